// How does CUDA's runtime behave towards PyTorch, without a GPU?
//
// Streams are threads that run late on purpose, device memory is unmapped when it is freed, and what CUDA forbids while
// a graph is recorded fails here too. Kernels cannot run: see operators.cpp.
//
// Semantics: CUDA Runtime API, "Stream Management" (cudaThreadExchangeStreamCaptureMode says which calls are unsafe),
// "Event Management", "Memory Management", "Graph Management"; CUDA C++ Programming Guide, "Prohibited and Unhandled
// Operations" of stream capture. Not here: forks of a capture onto other streams, more than one device, IPC.
//
// CUDA_ON_CPU_DEVICE_MB, CUDA_ON_CPU_PINNED_MB: memory of each kind (4096). CUDA_ON_CPU_JITTER_US: every fourth work of
// a stream waits for up to so long (150).
#include "model.hpp"

extern "C" {

// -- device --
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int) {
  std::snprintf(id, length, "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { auto code = t_last; t_last = cudaSuccess; return code; }
cudaError_t cudaPeekAtLastError() { return t_last; }
const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureWrongThread: return "cudaErrorStreamCaptureWrongThread";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    case cudaErrorAssert: return "cudaErrorAssert";
    default: return "cudaErrorOther";
  }
}
const char* cudaGetErrorString(cudaError_t code) {
  switch (code) {
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    default: return cudaGetErrorName(code);
  }
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "CUDA on the CPU (emulated)");
  properties->totalGlobalMem = g_device_bytes;
  properties->major = 8;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->sharedMemPerBlock = 48 << 10;
  properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 4 << 20;
  for (int axis = 0; axis < 3; ++axis) properties->maxThreadsDim[axis] = 1024, properties->maxGridSize[axis] = 65535;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 8 : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  if (cudaError_t code = whole_device()) return result(code);
  drain_all();
  return result(cudaSuccess);
}
cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** found, unsigned int, unsigned long long, cudaDriverEntryPointQueryResult* status) {
  *found = nullptr;
  if (status) *status = cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// -- memory --
cudaError_t cudaMalloc(void** out, size_t size) {
  if (cudaError_t code = unsafe_call()) return result(code);
  return result(allocate(out, size, g_device, g_device_used, g_device_bytes));
}
cudaError_t cudaFree(void* pointer) { return result(release(pointer, g_device, g_device_used)); }
cudaError_t cudaHostAlloc(void** out, size_t size, unsigned int) {
  if (cudaError_t code = unsafe_call()) return result(code);
  return result(allocate(out, size, g_pinned, g_pinned_used, g_pinned_bytes));
}
cudaError_t cudaFreeHost(void* pointer) { return result(release(pointer, g_pinned, g_pinned_used)); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  std::lock_guard<std::mutex> held(g_lock);
  *total = g_device_bytes;
  *free_bytes = *total - g_device_used;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  std::memset(attributes, 0, sizeof *attributes);
  auto* address = const_cast<void*>(pointer);
  if (on_device(pointer)) attributes->type = cudaMemoryTypeDevice, attributes->devicePointer = address;
  else if (is_pinned(pointer)) attributes->type = cudaMemoryTypeHost, attributes->hostPointer = address;
  else attributes->type = cudaMemoryTypeUnregistered;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t handle) {
  Stream* stream = of(handle);
  bool from_pageable = !on_device(from) && !is_pinned(from), to_pageable = !on_device(to) && !is_pinned(to);
  if (from_pageable && !to_pageable) {  // staged before the call returns
    auto* bytes = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(bytes, bytes + size);
    return result(submit(stream, [=] { std::memcpy(to, staged->data(), size); }));
  }
  cudaError_t code = submit(stream, [=] { std::memmove(to, from, size); });
  if (code == cudaSuccess && to_pageable && !stream->capture) drain(stream);
  return result(code);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  if (cudaError_t code = unsafe_call()) return result(code);
  if (cudaError_t code = cudaMemcpyAsync(to, from, size, kind, nullptr)) return code;
  drain(of(cudaStream_t{}));
  return result(cudaSuccess);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t handle) {
  return result(submit(of(handle), [=] { std::memset(to, value, size); }));
}
cudaError_t cudaMemset(void* to, int value, size_t size) { return cudaMemsetAsync(to, value, size, nullptr); }

// -- streams --
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned int, int priority) {
  if (cudaError_t code = unsafe_call()) return result(code);
  *out = reinterpret_cast<cudaStream_t>(make_stream(priority));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned int flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t handle) { drain(of(handle)); return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  *priority = of(handle)->priority;
  return cudaSuccess;
}
static cudaError_t not_while_capturing(Stream* stream) {
  std::lock_guard<std::mutex> held(stream->lock);
  if (!stream->capture) return cudaSuccess;
  stream->capture->valid = false;
  return cudaErrorStreamCaptureUnsupported;
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  if (cudaError_t code = not_while_capturing(of(handle))) return result(code);
  drain(of(handle));
  return result(cudaSuccess);
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  if (cudaError_t code = not_while_capturing(of(handle))) return result(code);
  std::lock_guard<std::mutex> held(of(handle)->lock);
  return result(of(handle)->done == of(handle)->submitted ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  return result(submit(of(handle), [=] { function(data); }));
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned int) {
  return result(submit(of(handle), [=] { function(handle, cudaSuccess, data); }));
}

// -- events --
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned int) {
  *out = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }  // works may still hold it
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  Stream* stream = of(on);
  Event* event = of(handle);
  {
    std::lock_guard<std::mutex> held(stream->lock);
    std::lock_guard<std::mutex> owned(event->lock);
    event->captured_by = stream->capture ? stream->capture->id : 0;
    if (stream->capture) return cudaSuccess;
  }
  unsigned long long number;
  {
    std::lock_guard<std::mutex> owned(event->lock);
    number = ++event->recorded;
  }
  return result(submit(stream, [=] {
    std::lock_guard<std::mutex> owned(event->lock);
    event->done = number;
    event->at = std::chrono::steady_clock::now();
    event->changed.notify_all();
  }));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  if (cudaError_t code = unsafe_call()) return result(code);
  Event* event = of(handle);
  std::unique_lock<std::mutex> held(event->lock);
  if (event->captured_by) return result(cudaErrorCapturedEvent);
  auto target = event->recorded;
  event->changed.wait(held, [&] { return event->done >= target; });
  return result(cudaSuccess);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (cudaError_t code = unsafe_call()) return result(code);
  Event* event = of(handle);
  std::lock_guard<std::mutex> held(event->lock);
  if (event->captured_by) return result(cudaErrorCapturedEvent);
  return result(event->done >= event->recorded ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  *ms = std::chrono::duration<float, std::milli>(of(to)->at - of(from)->at).count();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned int) {
  Stream* stream = of(handle);
  Event* event = of(awaited);
  unsigned long long target;
  {
    std::lock_guard<std::mutex> held(stream->lock);
    std::lock_guard<std::mutex> owned(event->lock);
    unsigned long long own = stream->capture ? stream->capture->id : 0;
    if (event->captured_by != own) {
      if (stream->capture) stream->capture->valid = false;
      return result(own ? cudaErrorStreamCaptureIsolation : cudaErrorNotSupported);
    }
    if (own) return cudaSuccess;
    target = event->recorded;
  }
  return result(submit(stream, [=] {
    std::unique_lock<std::mutex> held(event->lock);
    event->changed.wait(held, [&] { return event->done >= target; });
  }));
}

// -- graphs --
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, t_mode);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  Stream* stream = of(handle);
  if (stream == of(cudaStream_t{})) return result(cudaErrorStreamCaptureUnsupported);
  std::lock_guard<std::mutex> held(stream->lock);
  if (stream->capture) return result(cudaErrorIllegalState);
  std::lock_guard<std::mutex> all(g_lock);
  stream->capture = std::make_unique<Capture>();
  stream->capture->id = g_next_capture++;
  stream->capture->mode = mode;
  stream->capture->thread = std::this_thread::get_id();
  g_captures.insert(stream->capture.get());
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  Stream* stream = of(handle);
  *out = nullptr;
  std::lock_guard<std::mutex> held(stream->lock);
  if (!stream->capture) return result(cudaErrorIllegalState);
  Capture& capture = *stream->capture;
  if (capture.mode != cudaStreamCaptureModeRelaxed && capture.thread != std::this_thread::get_id())
    return result(cudaErrorStreamCaptureWrongThread);
  bool valid = capture.valid;
  if (valid) *out = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Recorded>(capture.graph));
  std::lock_guard<std::mutex> all(g_lock);
  g_captures.erase(&capture);
  stream->capture.reset();
  return result(valid ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  std::lock_guard<std::mutex> held(of(handle)->lock);
  auto& capture = of(handle)->capture;
  *status = !capture ? cudaStreamCaptureStatusNone
            : capture->valid ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
  return cudaSuccess;
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
  if (edges) *edges = nullptr;
#else
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** nodes, size_t* count) {
#endif
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (count) *count = 0;
  cudaStreamIsCapturing(handle, status);
  std::lock_guard<std::mutex> held(of(handle)->lock);
  if (id) *id = of(handle)->capture ? of(handle)->capture->id : 0;
  return cudaSuccess;
}
static std::shared_ptr<Recorded>& recorded(void* graph) { return *static_cast<std::shared_ptr<Recorded>*>(graph); }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = recorded(graph)->works.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  if (cudaError_t code = unsafe_call()) return result(code);
  *out = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<Recorded>(recorded(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete &recorded(graph); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { delete &recorded(exec); return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t handle) {
  auto graph = recorded(exec);
  return result(submit(of(handle), [graph] {
    thread_local std::minstd_rand dice(static_cast<unsigned>(reinterpret_cast<size_t>(&dice) >> 6));
    for (auto& work : graph->works) {
      linger(dice);
      work();
    }
  }));
}

// -- kernels, which only a GPU can run --
void cuda_on_cpu_assert() { g_lost = cudaErrorAssert; }  // for operators.cpp: what its operator refuses a kernel asserts
void** __cudaRegisterFatBinary(void*) { static void* handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> held(g_lock);
  g_kernels[host] = name;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* function) {
  *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return result(no_kernel(kernel));
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return result(no_kernel(function));
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return result(no_kernel(function));
}

// -- the driver API, of which PyTorch asks little: a context that is always there --
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) { *flags = 0; *active = 1; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { *context = reinterpret_cast<void*>(1); return 0; }
int cuCtxGetCurrent(void** context) { *context = reinterpret_cast<void*>(1); return 0; }
int cuCtxSetCurrent(void*) { return 0; }
int cuGetErrorString(int, const char** text) { *text = "operation not supported"; return 0; }
#define NOT_HERE(name) int name() { return cudaErrorNotSupported; }
NOT_HERE(cuDeviceGetAttribute) NOT_HERE(cuFuncGetAttribute) NOT_HERE(cuFuncSetAttribute)
NOT_HERE(cuFuncSetCacheConfig) NOT_HERE(cuLaunchCooperativeKernel) NOT_HERE(cuLaunchKernel)
NOT_HERE(cuLinkAddData_v2) NOT_HERE(cuLinkComplete) NOT_HERE(cuLinkCreate_v2) NOT_HERE(cuModuleGetFunction)
NOT_HERE(cuModuleLoad) NOT_HERE(cuModuleLoadData) NOT_HERE(cuModuleLoadDataEx) NOT_HERE(cuModuleUnload)
NOT_HERE(cuOccupancyMaxActiveBlocksPerMultiprocessor) NOT_HERE(cuPointerGetAttribute)
NOT_HERE(cuTensorMapEncodeTiled)

}  // extern "C"
