// A flush takes a queue as an Io does, and waits for the end of its command.
#include "nvme/controller.hpp"

namespace penstock::nvme {

void flush(Controller& controller, std::uint32_t nsid) {
  controller.require_own_process();
  const auto& options = controller.options();
  const auto event = std::make_shared<EventFd>();
  const auto client = controller.add_client([event] { event->notify(); });
  std::unique_ptr<Channel> channel;
  View view{};
  const auto leave = [&] {
    if (channel && channel->connection().quiet() && channel->connection().violation().empty())
      controller.give_back(*client, view.generation, std::move(channel));
    controller.remove_client(client);
  };
  const auto take_queue = [&] {
    const auto until = Clock::now() + seconds(options.reconnect_timeout_s);
    controller.ask_for_queue(*client);
    while (true) {
      view = controller.look(*client);
      if (view.state == View::State::closed) throw Error(Kind::closed, view.why);
      if (!view.channels.empty()) {
        channel = std::move(view.channels.front());
        return;
      }
      if (Clock::now() >= until)
        throw Error(Kind::timeout, view.why.empty() ? options.url() + ": no queue for a flush" : view.why);
      wait_for(-1, 0, {until, event.get(), {}, std::chrono::hours(1), true});
    }
  };
  const auto interrupted = [&] {
    if (!client->changed.exchange(false)) return;
    const auto now = controller.look(*client);
    if (now.state != View::State::up || now.generation != view.generation)
      throw Error(Kind::lost, "the association is lost");
  };
  Command command;
  command.entry = nvme::flush(nsid);
  try {
    for (int tries = 1;; ++tries) {
      if (!channel) take_queue();
      try {
        const auto until = Clock::now() + seconds(options.command_timeout_s);
        const auto completion =
            channel->execute(command, {until, event.get(), interrupted, std::chrono::hours(1)});
        if (completion.status == 0) break;
        if ((completion.status & kDoNotRetry) != 0 || tries == kMostTries)
          throw Error(status_code(completion.status) == 0x0b ? Kind::name_space : Kind::lost,
                      options.url() + ": flush of namespace " + std::to_string(nsid) + ": " +
                          status_text(completion.status));
        const auto pause = controller.pause_before_retry(completion.status, tries);
        wait_for(-1, 0, {Clock::now() + pause, event.get(), {}, std::chrono::hours(1), true});
      } catch (const Error& error) {
        if (channel->connection().quiet() && channel->connection().violation().empty()) throw;
        channel.reset();
        controller.report_loss(view.generation, error.kind, "flush: " + error.text);
        if (tries == kMostTries) throw controller.described(error);
      }
      ++controller.counters.retries;
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

}  // namespace penstock::nvme
