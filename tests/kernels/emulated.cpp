// Runs one call of a compiled kernel that another process has written into a file, and writes its memory back.
// The file: the kernel's name (64 bytes), two flags, sizes of the arguments' structure, of its pointers and of the
// buffers, and these; a pointer is its place in the structure, a buffer's number and a distance into it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define KERNEL(name) \
  extern "C" void adjoint_##name##_f32(const void*, int, int); \
  extern "C" void adjoint_##name##_f64(const void*, int, int);
KERNELS(KERNEL)  // the compiler's command names them: X(scan) X(ssd) ...
struct Entry { const char* name; void (*call)(const void*, int, int); };
#define ENTRIES(name) {"adjoint_" #name "_f32", adjoint_##name##_f32}, {"adjoint_" #name "_f64", adjoint_##name##_f64},
static const Entry entries[] = {KERNELS(ENTRIES)};
extern "C" int adjoint_vector_bytes();

int main(int count, char** arguments) {
  if (count == 1) return std::printf("%d\n", adjoint_vector_bytes()), 0;
  FILE* file = std::fopen(arguments[1], "r+b");
  char name[64];
  int64_t head[5];  // flags, bytes of arguments, pointers, buffers
  if (!file || !std::fread(name, 64, 1, file) || !std::fread(head, sizeof head, 1, file)) return 2;
  std::vector<char> given(head[2]);
  if (!std::fread(given.data(), head[2], 1, file)) return 2;
  std::vector<int64_t> pointers(3 * head[3]), sizes(2 * head[4]);  // a buffer's bytes, and its address modulo 64
  if (head[3] && !std::fread(pointers.data(), 24 * head[3], 1, file)) return 2;
  if (head[4] && !std::fread(sizes.data(), 16 * head[4], 1, file)) return 2;
  const long start = std::ftell(file);
  std::vector<char*> buffers;
  for (int64_t i = 0; i < head[4]; i++) {
    buffers.push_back((char*)std::aligned_alloc(64, (sizes[2 * i] + 255) / 64 * 64) + sizes[2 * i + 1]);
    if (sizes[2 * i] && !std::fread(buffers[i], sizes[2 * i], 1, file)) return 2;
  }
  for (int64_t i = 0; i < head[3]; i++) {
    char* to = buffers[pointers[3 * i + 1]] + pointers[3 * i + 2];
    std::memcpy(given.data() + pointers[3 * i], &to, sizeof to);
  }
  for (const Entry& entry : entries)
    if (!std::strcmp(entry.name, name)) {
      entry.call(given.data(), int(head[0]), int(head[1]));
      std::fseek(file, start, SEEK_SET);
      for (int64_t i = 0; i < head[4]; i++) std::fwrite(buffers[i], 1, sizes[2 * i], file);
      return std::fclose(file);
    }
  return 3;
}
