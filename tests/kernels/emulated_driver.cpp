// SPDX-License-Identifier: Apache-2.0
//
// Runs plans for a process of another architecture: takes requests from the standard input, answers on the standard
// output, ends where the input does. Its argument is the library of the kernels. emulation.py is the other side.
//
// All numbers are int64. A request is
//   0, count, words[count]: reads a plan                                   -> its handle, or 0
//   1, handle: frees it                                                    -> nothing
//   2, handle, begin, end, live, threads, regions, buffers,
//      {bytes, misalignment} of each region, {region, offset} of each buffer,
//      the bytes of the regions: runs steps                                -> what step_run returns, the bytes of the regions
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

void* (*stepPlan)(const int64_t*, int64_t);
void (*stepFree)(void*);
int64_t (*stepRun)(void*, int64_t, int64_t, void* const*, int64_t, int64_t);

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "driver: %s\n", what);
  std::_Exit(1);
}

void readBytes(void* to, int64_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != static_cast<size_t>(bytes)) {
    fail("a request ends early");
  }
}
int64_t readNumber() {
  int64_t value;
  readBytes(&value, sizeof(value));
  return value;
}
void writeBytes(const void* from, int64_t bytes) {
  if (std::fwrite(from, 1, bytes, stdout) != static_cast<size_t>(bytes)) {
    fail("an answer cannot be written");
  }
}
void writeNumber(int64_t value) { writeBytes(&value, sizeof(value)); }

// Memory at an address as far behind a cache line as it is in the other process.
struct Region {
  static constexpr int64_t kLine = 64;

  int64_t bytes, misalignment;
  std::unique_ptr<char[]> memory{};

  char* begin() const {
    const auto address = reinterpret_cast<uintptr_t>(memory.get());
    return memory.get() + (kLine - address % kLine) + misalignment;
  }
};

void readPlan() {
  std::vector<int64_t> words(readNumber());
  readBytes(words.data(), words.size() * sizeof(words[0]));
  writeNumber(reinterpret_cast<int64_t>(stepPlan(words.data(), words.size())));
}

void runPlan() {
  void* plan = reinterpret_cast<void*>(readNumber());
  const int64_t begin = readNumber(), end = readNumber(), live = readNumber(), threads = readNumber();
  std::vector<Region> regions(readNumber());
  std::vector<void*> buffers(readNumber());
  for (Region& region : regions) {
    region.bytes = readNumber();
    region.misalignment = readNumber();
    region.memory.reset(new char[region.bytes + 2 * Region::kLine]);
  }
  for (void*& buffer : buffers) {
    const int64_t region = readNumber(), offset = readNumber();
    buffer = regions.at(region).begin() + offset;
  }
  for (Region& region : regions) {
    readBytes(region.begin(), region.bytes);
  }
  writeNumber(stepRun(plan, begin, end, buffers.data(), live, threads));
  for (const Region& region : regions) {
    writeBytes(region.begin(), region.bytes);
  }
}

template <class Function>
void find(Function& function, void* library, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) {
    fail(dlerror());
  }
}

}  // namespace

int main(int count, char** arguments) {
  void* library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  if (!library) {
    fail(count == 2 ? dlerror() : "needs the path of a library");
  }
  find(stepPlan, library, "step_plan");
  find(stepFree, library, "step_free");
  find(stepRun, library, "step_run");
  int64_t request;
  while (std::fread(&request, sizeof(request), 1, stdin) == 1) {
    switch (request) {
      case 0:
        readPlan();
        break;
      case 1:
        stepFree(reinterpret_cast<void*>(readNumber()));
        break;
      case 2:
        runPlan();
        break;
      default:
        fail("an unknown request");
    }
    std::fflush(stdout);
  }
  std::_Exit(0);  // the pool's threads sleep, and nobody joins them
}
