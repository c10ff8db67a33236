// What is a stream, an event, a recording, memory? The model behind runtime.cpp, in CUDA's terms.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

using Work = std::function<void()>;

struct Recorded {
  std::vector<Work> works;
};

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  bool valid = true;
  std::shared_ptr<Recorded> graph = std::make_shared<Recorded>();
};

struct Stream {
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Work> waiting;
  unsigned long long submitted = 0, done = 0;
  int priority = 0;
  std::unique_ptr<Capture> capture;
};

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  unsigned long long recorded = 0, done = 0;
  unsigned long long captured_by = 0;
  std::chrono::steady_clock::time_point at{};
};

std::mutex g_lock;  // what follows
std::map<char*, size_t> g_device, g_pinned;
size_t g_device_used = 0, g_pinned_used = 0;
std::set<Stream*> g_streams;
std::set<Capture*> g_captures;
unsigned long long g_next_capture = 1;
std::unordered_map<const void*, std::string> g_kernels;

thread_local cudaError_t t_last = cudaSuccess;
thread_local cudaStreamCaptureMode t_mode = cudaStreamCaptureModeGlobal;

size_t setting(const char* name, size_t otherwise) {
  const char* said = std::getenv(name);
  return said ? std::strtoull(said, nullptr, 10) : otherwise;
}
size_t megabytes(const char* name) { return setting(name, 4096) << 20; }
const size_t g_device_bytes = megabytes("CUDA_ON_CPU_DEVICE_MB"), g_pinned_bytes = megabytes("CUDA_ON_CPU_PINNED_MB");

std::atomic<cudaError_t> g_lost{cudaSuccess};  // what every call ends with once a kernel has failed: CUDA's "sticky" error

cudaError_t result(cudaError_t code) {
  if (g_lost != cudaSuccess) code = g_lost;
  if (code != cudaSuccess) t_last = code;
  return code;
}

void linger(std::minstd_rand& dice) {
  static const size_t jitter_us = setting("CUDA_ON_CPU_JITTER_US", 150);
  if (jitter_us && dice() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice() % jitter_us));
}

void serve(Stream* stream) {
  std::minstd_rand dice(static_cast<unsigned>(reinterpret_cast<size_t>(stream) >> 6));
  std::unique_lock<std::mutex> held(stream->lock);
  for (;;) {
    stream->changed.wait(held, [&] { return !stream->waiting.empty(); });
    Work work = std::move(stream->waiting.front());
    stream->waiting.pop_front();
    held.unlock();
    linger(dice);
    work();
    work = nullptr;
    held.lock();
    ++stream->done;
    stream->changed.notify_all();
  }
}

Stream* make_stream(int priority) {
  auto* stream = new Stream;
  stream->priority = priority;
  std::thread(serve, stream).detach();
  std::lock_guard<std::mutex> held(g_lock);
  g_streams.insert(stream);
  return stream;
}

Stream* of(cudaStream_t handle) {
  static Stream* legacy = make_stream(0);
  auto number = reinterpret_cast<size_t>(handle);
  return number <= 2 ? legacy : reinterpret_cast<Stream*>(handle);
}

Event* of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

bool alive(Stream* stream) {
  std::lock_guard<std::mutex> held(g_lock);
  return g_streams.count(stream) != 0;
}

// "Potentially unsafe" calls: cudaThreadExchangeStreamCaptureMode says when they are prohibited.
cudaError_t unsafe_call() {
  if (t_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard<std::mutex> held(g_lock);
  bool prohibited = false;
  for (Capture* capture : g_captures) {
    bool own = capture->thread == std::this_thread::get_id() && capture->mode != cudaStreamCaptureModeRelaxed;
    bool others = t_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (own || others) {
      capture->valid = false;
      prohibited = true;
    }
  }
  return prohibited ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

cudaError_t whole_device() {
  std::lock_guard<std::mutex> held(g_lock);
  for (Capture* capture : g_captures) capture->valid = false;
  return g_captures.empty() ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

cudaError_t submit(Stream* stream, Work work) {
  if (!alive(stream)) return cudaErrorInvalidResourceHandle;
  std::lock_guard<std::mutex> held(stream->lock);
  if (stream->capture) {
    if (!stream->capture->valid) return cudaErrorStreamCaptureInvalidated;
    stream->capture->graph->works.push_back(std::move(work));
    return cudaSuccess;
  }
  stream->waiting.push_back(std::move(work));
  ++stream->submitted;
  stream->changed.notify_all();
  return cudaSuccess;
}

void drain(Stream* stream) {
  std::unique_lock<std::mutex> held(stream->lock);
  auto target = stream->submitted;
  stream->changed.wait(held, [&] { return stream->done >= target; });
}

void drain_all() {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> held(g_lock);
    all.assign(g_streams.begin(), g_streams.end());
  }
  for (Stream* stream : all) drain(stream);
}

bool inside(const std::map<char*, size_t>& blocks, const void* pointer) {
  auto* at = const_cast<char*>(static_cast<const char*>(pointer));
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return false;
  --next;
  return at < next->first + next->second;
}

bool on_device(const void* pointer) {
  std::lock_guard<std::mutex> held(g_lock);
  return inside(g_device, pointer);
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> held(g_lock);
  return inside(g_pinned, pointer);
}

cudaError_t allocate(void** out, size_t size, std::map<char*, size_t>& blocks, size_t& used, size_t limit) {
  *out = nullptr;
  size_t rounded = (size + 4095) & ~size_t{4095};
  std::lock_guard<std::mutex> held(g_lock);
  if (rounded > limit || used + rounded > limit) return cudaErrorMemoryAllocation;
  void* found = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) return cudaErrorMemoryAllocation;
  std::memset(found, 0xA5, rounded < (1 << 20) ? rounded : (1 << 20));
  blocks[static_cast<char*>(found)] = rounded;
  used += rounded;
  *out = found;
  return cudaSuccess;
}

cudaError_t release(void* pointer, std::map<char*, size_t>& blocks, size_t& used) {
  if (!pointer) return cudaSuccess;
  if (cudaError_t code = unsafe_call()) return code;
  drain_all();
  std::lock_guard<std::mutex> held(g_lock);
  auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return cudaErrorInvalidValue;
  munmap(found->first, found->second);
  used -= found->second;
  blocks.erase(found);
  return cudaSuccess;
}

cudaError_t no_kernel(const void* function) {
  std::string name = "?";
  {
    std::lock_guard<std::mutex> held(g_lock);
    auto found = g_kernels.find(function);
    if (found != g_kernels.end()) name = found->second;
  }
  std::fprintf(stderr, "cuda-on-cpu: a kernel cannot run here: %s\n", name.c_str());
  return cudaErrorNotSupported;
}

}  // namespace
