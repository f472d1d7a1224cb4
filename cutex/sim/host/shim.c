/* Stands in for the DSL's runtime library and for TVM-FFI's C API when a compiled kernel's host half is linked for the
 * simulator: every launch calls back into Python with its grid, block, attributes and parameters; nothing touches a GPU.
 *
 * The structures mirror the ABI that the exported objects of nvidia-cutlass-dsl 4.8 use:
 *   launch configuration  {u32 grid[3], u32 block[3], u64 smem, stream, attributes, u32 count}
 *   launch attribute      72 bytes: u32 id, padding, 64 bytes of value
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  uint32_t grid[3], block[3];
  uint64_t smem;
  void *stream, *attributes;
  uint32_t num_attributes;
} LaunchConfig;

typedef int (*LaunchHook)(const char *kernel, const LaunchConfig *config, void **params);
typedef void (*ErrorHook)(const char *kind, const char *message);
typedef int (*EncodeHook)(void *map, int type, uint32_t rank, void *address, const uint64_t *dims, const uint64_t *strides,
                          const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int l2_promotion, int fill);

/* of each thread: the host code runs in the one that calls it */
static _Thread_local LaunchHook on_launch;
static _Thread_local ErrorHook on_error;
static _Thread_local EncodeHook on_encode;

void cutex_sim_hooks(LaunchHook launch, ErrorHook error, EncodeHook encode) {
  on_launch = launch;
  on_error = error;
  on_encode = encode;
}

int _cudaLaunchKernelEx(LaunchConfig *config, void *kernel, void **params) {
  return on_launch ? on_launch((const char *)kernel, config, params) : 1;
}

/* The driver's function, for kernels that leave the encoding of their tensor maps to it. */
int _cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *dims, const uint64_t *strides,
                            const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int l2_promotion,
                            int fill) {
  return on_encode ? on_encode(map, type, rank, address, dims, strides, box, steps, interleave, swizzle, l2_promotion, fill)
                   : 1;
}
/* The DSL's runtime aborts here. What the hook refused, it keeps, and refuses the launch that follows. */
void cuda_dialect_assert_success(int error) { (void)error; }

/* A kernel handle is its name. */
int _cudaLibraryGetKernel(void **kernel, void *library, const char *name) {
  (void)library;
  *kernel = strdup(name);
  return 0;
}

int _cudaLibraryLoadData(void **library, const void *code, void *a, void *b, uint32_t na, void *c, void *d, uint32_t nc) {
  (void)code; (void)a; (void)b; (void)na; (void)c; (void)d; (void)nc;
  *library = (void *)1;
  return 0;
}

int _cudaLibraryUnload(void *library) { (void)library; return 0; }
int _cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  (void)attribute; (void)kernel; (void)device;
  *value = 0;
  return 0;
}
int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 97 ? 232448 : 0; /* 97: shared memory per block, opt-in */
  return 0;
}
int _cudaFuncSetAttribute(const void *function, int attribute, int value) {
  (void)function; (void)attribute; (void)value;
  return 0;
}
int _cudaKernelSetAttributeForDevice(void *kernel, int attribute, int value, int device) {
  (void)kernel; (void)attribute; (void)value; (void)device;
  return 0;
}
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int _cudaSetDevice(int device) { (void)device; return 0; }
const char *cuda_dialect_get_error_name(int error) { (void)error; return "the simulator refused the launch"; }

typedef int (*InitLibrary)(void **library);
typedef int (*LoadLibrary)(void **library, int device);
typedef void (*SetError)(const char *kind, const char *message);

int cuda_dialect_init_library_once(void **state, InitLibrary init, LoadLibrary load, SetError error) {
  static void *library;
  (void)error;
  if (*state) return 0;
  if (init(&library) || load(&library, 0)) return -1;
  *state = library;
  return 0;
}
void cuda_dialect_unload_library_once(void **state) { (void)state; }

/* TVM-FFI's C API, as far as exported kernels use it. */
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
  if (on_error) on_error(kind, message);
}

void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  size_t size = 1;
  for (int i = 0; i < count; i++) size += parts[i] ? strlen(parts[i]) : 0;
  char *message = calloc(size, 1);
  for (int i = 0; i < count; i++)
    if (parts[i]) strcat(message, parts[i]);
  if (on_error) on_error(kind, message);
  free(message);
}

void *TVMFFIEnvGetStream(int32_t device_type, int32_t device_id) {
  (void)device_type; (void)device_id;
  return NULL;
}

void CuteDSLRT_TVMFFISetRaisedCudaError(void *set, int error) {
  (void)set; (void)error;
  if (on_error) on_error("LaunchError", "the launch did not finish");
}
