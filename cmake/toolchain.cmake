# Compiler cache, linker, sanitizers, and the one place where warnings are chosen.
find_program(SSMD_CCACHE ccache)
if(SSMD_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Paths relative to the source tree: clones in different folders share what they compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      CCACHE_NOHASHDIR=1 ${SSMD_CCACHE})
endif()
find_program(SSMD_MOLD mold)
if(SSMD_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

if(SSMD_SANITIZE)
  set(flags -fsanitize=${SSMD_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
  add_link_options(-fsanitize=${SSMD_SANITIZE})
endif()

# ssmd_target(<target>): include root and warnings, for code that we wrote.
function(ssmd_target target)
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  set(flags -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor
            -Wno-missing-field-initializers)  # designated initialisers rely on defaults
  if(SSMD_WERROR)
    list(APPEND flags -Werror)
  endif()
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${flags}>")
endfunction()
