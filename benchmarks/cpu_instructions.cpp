// Counts how often each instruction of a library runs while one of its functions is called: with the processor's trap
// flag set, it stops before every instruction and hands its address to a signal handler.
#include <csignal>
#include <cstdint>
#include <ucontext.h>

namespace {
uintptr_t begin, bytes;
uint32_t* executed;  // at each byte of the library: how often an instruction that begins there has run

void on_trap(int, siginfo_t*, void* context) {
  const uintptr_t at = uintptr_t(((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP]) - begin;
  if (at < bytes) executed[at]++;
}
// The stack below its pointer may be in use without having been reserved: 128 bytes of it are stepped over.
inline void set_trap_flag() {
  asm volatile("sub $128,%%rsp; pushfq; orq $0x100,(%%rsp); popfq; add $128,%%rsp" ::: "memory", "cc");
}
inline void clear_trap_flag() {
  asm volatile("sub $128,%%rsp; pushfq; andq $~0x100,(%%rsp); popfq; add $128,%%rsp" ::: "memory", "cc");
}
}  // namespace

extern "C" void count_instructions(uintptr_t library, uintptr_t size, uint32_t* counts,
                                   void (*function)(const void*, int64_t, int64_t), const void* arguments,
                                   int64_t second, int64_t third) {
  begin = library, bytes = size, executed = counts;
  struct sigaction handler = {}, before;
  handler.sa_sigaction = on_trap;
  handler.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &handler, &before);
  set_trap_flag();
  function(arguments, second, third);
  clear_trap_flag();
  sigaction(SIGTRAP, &before, nullptr);
}
