# The CUDA language, when SSMD_CUDA says so: AUTO means if nvcc is found. Sets SSMD_HAVE_CUDA.
set(SSMD_CUDA AUTO CACHE STRING "Build the CUDA backend: AUTO (when nvcc is found), ON, OFF")
set_property(CACHE SSMD_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SSMD_CUDA_GENCODE "arch=compute_90a,code=sm_90a" CACHE STRING
    "GPUs to compile for, as nvcc's -gencode has it; a list. The general kernels need sm_80 or later")
set(SSMD_HAVE_CUDA OFF)
if(SSMD_CUDA STREQUAL OFF OR SSMD_SANITIZE MATCHES thread)  # a race checker for host threads: no use beside the runtime's own
  return()
endif()

# tools/install_nvcc puts one into build/cuda where a machine has none.
find_program(SSMD_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda ${PROJECT_SOURCE_DIR}/build/cuda
             PATH_SUFFIXES bin)
if(NOT SSMD_NVCC)
  if(SSMD_CUDA STREQUAL ON)
    message(FATAL_ERROR "SSMD_CUDA=ON, and no nvcc: install the CUDA Toolkit 13, run tools/install_nvcc, or name it with -DSSMD_NVCC=")
  endif()
  message(STATUS "No nvcc: the CUDA backend is not built")
  return()
endif()
if(NOT SSMD_CUDA STREQUAL ON AND NOT "${SSMD_NVCC_WORKS}" STREQUAL "${SSMD_NVCC}")
  # AUTO must not fail where nvcc is half installed, or does not like this machine's C++ compiler.
  set(probe ${CMAKE_BINARY_DIR}/nvcc_probe)
  file(WRITE ${probe}.cu "__global__ void Probe() {}\nint main() { Probe<<<1, 1>>>(); }\n")
  list(TRANSFORM SSMD_CUDA_GENCODE PREPEND "-gencode=" OUTPUT_VARIABLE gencode)
  execute_process(COMMAND ${SSMD_NVCC} -std=c++20 ${gencode} -o ${probe} ${probe}.cu
                  RESULT_VARIABLE failed OUTPUT_VARIABLE why ERROR_VARIABLE why)
  if(NOT failed EQUAL 0)
    message(STATUS "${SSMD_NVCC} does not work here, so the CUDA backend is not built (SSMD_CUDA=ON insists): ${why}")
    return()
  endif()
  set(SSMD_NVCC_WORKS ${SSMD_NVCC} CACHE INTERNAL "the nvcc that was seen to work")
endif()

if(SSMD_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
endif()
set(CMAKE_CUDA_COMPILER ${SSMD_NVCC})
set(CMAKE_CUDA_ARCHITECTURES OFF)  # chosen by -gencode: CMake does not know every suffix
enable_language(CUDA)
foreach(kind STANDARD EXTENSION)  # CMake 3.25 does not know that nvcc has it
  if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
    set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
  endif()
endforeach()
set(CMAKE_CUDA_STANDARD 20)
# CMake 3.25.1, Debian 12's, sets a property of this target also where the toolkit has none (CUDA 13): it stops there otherwise.
add_library(CUDA::nvToolsExt INTERFACE IMPORTED)
find_package(CUDAToolkit REQUIRED)
set(SSMD_HAVE_CUDA ON)

# ssmd_cuda_target(<target>): ssmd_target(), and the same for .cu sources as far as nvcc has it.
function(ssmd_cuda_target target)
  ssmd_target(${target})
  set(host_warnings -Wall,-Wextra,-Wshadow,-Wnon-virtual-dtor,-Wno-missing-field-initializers)
  set(flags --expt-relaxed-constexpr -Xcompiler=${host_warnings})
  foreach(gencode ${SSMD_CUDA_GENCODE})
    list(APPEND flags -gencode=${gencode})
  endforeach()
  if(SSMD_WERROR)
    list(APPEND flags -Werror=all-warnings -Xcompiler=-Werror)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${flags}>")
endfunction()
