#include "arena/linkage.hpp"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <span>
#include <string>

namespace penstock {

namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kSlotKinds[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT};
#elif defined(__aarch64__)
constexpr std::uint32_t kSlotKinds[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT};
#else
constexpr std::uint32_t kSlotKinds[] = {0xffffffff};  // of no relocation: nothing is found
#endif

struct Request {
  std::string_view library_suffix;
  std::string_view symbol;
  std::vector<Slot> slots;
};

// What of a library's dynamic section names the functions it calls.
struct Linkage {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  std::span<const ElfW(Rela)> calls, data;
  const std::uint32_t* hashes = nullptr;  // by which symbols that it defines are found
  std::uintptr_t protected_begin = 0, protected_end = 0;  // made read-only after linking
};

Linkage read_linkage(const dl_phdr_info& library) {
  const std::uintptr_t base = library.dlpi_addr;
  const ElfW(Dyn)* dynamic = nullptr;
  Linkage linkage;
  for (const auto& header : std::span(library.dlpi_phdr, library.dlpi_phnum)) {
    if (header.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(base + header.p_vaddr);
    if (header.p_type == PT_GNU_RELRO) {
      linkage.protected_begin = base + header.p_vaddr;
      linkage.protected_end = linkage.protected_begin + header.p_memsz;
    }
  }
  if (dynamic == nullptr) return linkage;
  // Some loaders leave addresses relative to the base.
  const auto address = [base](const ElfW(Dyn) & entry) {
    return entry.d_un.d_ptr < base ? base + entry.d_un.d_ptr : entry.d_un.d_ptr;
  };
  const ElfW(Rela) *calls = nullptr, *data = nullptr;
  std::size_t calls_bytes = 0, data_bytes = 0;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    switch (dynamic->d_tag) {
      case DT_SYMTAB: linkage.symbols = reinterpret_cast<const ElfW(Sym)*>(address(*dynamic)); break;
      case DT_STRTAB: linkage.names = reinterpret_cast<const char*>(address(*dynamic)); break;
      case DT_GNU_HASH: linkage.hashes = reinterpret_cast<const std::uint32_t*>(address(*dynamic)); break;
      case DT_JMPREL: calls = reinterpret_cast<const ElfW(Rela)*>(address(*dynamic)); break;
      case DT_PLTRELSZ: calls_bytes = dynamic->d_un.d_val; break;
      case DT_RELA: data = reinterpret_cast<const ElfW(Rela)*>(address(*dynamic)); break;
      case DT_RELASZ: data_bytes = dynamic->d_un.d_val; break;
      default: break;
    }
  }
  if (calls != nullptr) linkage.calls = {calls, calls_bytes / sizeof(ElfW(Rela))};
  if (data != nullptr) linkage.data = {data, data_bytes / sizeof(ElfW(Rela))};
  return linkage;
}

int visit(dl_phdr_info* library, std::size_t, void* argument) {
  auto& request = *static_cast<Request*>(argument);
  const std::string_view path = library->dlpi_name == nullptr ? "" : library->dlpi_name;
  if (!path.ends_with(request.library_suffix)) return 0;
  const auto linkage = read_linkage(*library);
  const int is_last = !request.library_suffix.empty();
  if (linkage.symbols == nullptr || linkage.names == nullptr) return is_last;
  for (const auto relocations : {linkage.calls, linkage.data}) {
    for (const auto& relocation : relocations) {
      const auto kind = ELF64_R_TYPE(relocation.r_info);
      if (std::ranges::find(kSlotKinds, kind) == std::end(kSlotKinds)) continue;
      const auto& symbol = linkage.symbols[ELF64_R_SYM(relocation.r_info)];
      if (request.symbol != linkage.names + symbol.st_name) continue;
      const std::uintptr_t slot = library->dlpi_addr + relocation.r_offset;
      void* const own = symbol.st_shndx == SHN_UNDEF ? nullptr : reinterpret_cast<void*>(library->dlpi_addr + symbol.st_value);
      request.slots.push_back({slot, linkage.protected_begin <= slot && slot < linkage.protected_end, own});
    }
  }
  return is_last;
}

struct Definition {
  std::string_view name;
  const void* function;
  void* target;
  bool done = false;
};

// Of the library's symbols by that name, versions of one another, the one that is the function.
const ElfW(Sym) * find_definition(const Linkage& linkage, const Definition& wanted, std::uintptr_t base) {
  std::uint32_t hash = 5381;
  for (const char letter : wanted.name) hash = hash * 33 + static_cast<unsigned char>(letter);
  // Counts of buckets, of symbols that are not defined, of words of the filter, a shift; then the filter.
  const auto* const head = linkage.hashes;
  const auto bucket_count = head[0], undefined = head[1], filter_words = head[2];
  const auto* const buckets = head + 4 + filter_words * (sizeof(ElfW(Addr)) / sizeof(std::uint32_t));
  const auto* const chains = buckets + bucket_count;
  if (bucket_count == 0) return nullptr;
  for (auto i = buckets[hash % bucket_count]; i >= undefined; ++i) {
    const auto& symbol = linkage.symbols[i];
    if ((chains[i - undefined] | 1) == (hash | 1) && wanted.name == linkage.names + symbol.st_name &&
        symbol.st_shndx != SHN_UNDEF && base + symbol.st_value == reinterpret_cast<std::uintptr_t>(wanted.function))
      return &symbol;
    if (chains[i - undefined] & 1) break;
  }
  return nullptr;
}

int visit_definition(dl_phdr_info* library, std::size_t, void* argument) {
  auto& wanted = *static_cast<Definition*>(argument);
  const auto linkage = read_linkage(*library);
  if (linkage.symbols == nullptr || linkage.names == nullptr || linkage.hashes == nullptr) return 0;
  const std::uintptr_t base = library->dlpi_addr;
  const auto* const symbol = find_definition(linkage, wanted, base);
  if (symbol == nullptr) return 0;
  const auto value = reinterpret_cast<std::uintptr_t>(&symbol->st_value);
  int protection = 0;
  for (const auto& header : std::span(library->dlpi_phdr, library->dlpi_phnum)) {
    if (header.p_type != PT_LOAD || value < base + header.p_vaddr || value >= base + header.p_vaddr + header.p_memsz)
      continue;
    protection = (header.p_flags & PF_R ? PROT_READ : 0) | (header.p_flags & PF_X ? PROT_EXEC : 0) |
                 (header.p_flags & PF_W ? PROT_WRITE : 0);
  }
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* const page = reinterpret_cast<void*>(value / page_bytes * page_bytes);
  if (protection == 0 || mprotect(page, page_bytes, protection | PROT_WRITE) != 0) return 1;
  // Relative to the library, and addresses wrap around.
  std::atomic_ref(*reinterpret_cast<ElfW(Addr)*>(value))
      .store(reinterpret_cast<std::uintptr_t>(wanted.target) - base, std::memory_order_release);
  mprotect(page, page_bytes, protection);
  wanted.done = true;
  return 1;
}

}  // namespace

void* find_function(std::string_view name) { return dlsym(RTLD_DEFAULT, std::string(name).c_str()); }

bool redirect(std::string_view name, void* function, void* target) {
  Definition wanted{name, function, target};
  dl_iterate_phdr(visit_definition, &wanted);
  return wanted.done;
}

std::vector<Slot> find_slots(std::string_view library_suffix, std::string_view symbol) {
  Request request{library_suffix, symbol, {}};
  dl_iterate_phdr(visit, &request);
  return request.slots;
}

bool write_slot(const Slot& slot, void* target) {
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* page = reinterpret_cast<void*>(slot.address / page_bytes * page_bytes);
  if (slot.read_only && mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
  std::atomic_ref(*reinterpret_cast<void**>(slot.address)).store(target, std::memory_order_release);
  if (slot.read_only) mprotect(page, page_bytes, PROT_READ);
  return true;
}

}  // namespace penstock
