#include "arena/linkage.hpp"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <span>

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
  if (linkage.symbols == nullptr || linkage.names == nullptr) return 1;
  for (const auto relocations : {linkage.calls, linkage.data}) {
    for (const auto& relocation : relocations) {
      const auto kind = ELF64_R_TYPE(relocation.r_info);
      if (std::ranges::find(kSlotKinds, kind) == std::end(kSlotKinds)) continue;
      const auto& symbol = linkage.symbols[ELF64_R_SYM(relocation.r_info)];
      if (request.symbol != linkage.names + symbol.st_name) continue;
      const std::uintptr_t slot = library->dlpi_addr + relocation.r_offset;
      request.slots.push_back({slot, linkage.protected_begin <= slot && slot < linkage.protected_end});
    }
  }
  return 1;
}

}  // namespace

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
