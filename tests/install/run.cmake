# Installs into a folder of the build tree, or points at the sources; then configures, builds and
# runs the foreign project. Variables: MODE (package or sources), SOURCE_DIR, BUILD_DIR, WORK_DIR,
# BUILD_TYPE, and what the foreign project is compiled with: CXX_COMPILER, CXX_FLAGS,
# CXX_FLAGS_RELEASE, SANITIZE, LAUNCHER, GENERATOR.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGN}")
  endif()
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
set(arguments -G ${GENERATOR} -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
    -DCMAKE_CXX_FLAGS=${CXX_FLAGS} -DCMAKE_CXX_FLAGS_RELEASE=${CXX_FLAGS_RELEASE}
    -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
if(MODE STREQUAL "package")
  run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${WORK_DIR}/prefix)
  list(APPEND arguments -DCMAKE_PREFIX_PATH=${WORK_DIR}/prefix)
  if(SANITIZE)
    list(APPEND arguments -DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE})
  endif()
else()
  list(APPEND arguments -DFOVEA_SOURCE_DIR=${SOURCE_DIR} -DFOVEA_SANITIZE=${SANITIZE})
endif()
run(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/consumer -B ${WORK_DIR}/build ${arguments})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build --target consumer --parallel 2)
run(${WORK_DIR}/build/consumer)

if(MODE STREQUAL "package")
  # The executable needs what every C++ program with threads needs, and nothing else.
  file(GET_RUNTIME_DEPENDENCIES EXECUTABLES ${WORK_DIR}/build/consumer RESOLVED_DEPENDENCIES_VAR
       libraries UNRESOLVED_DEPENDENCIES_VAR missing)
  foreach(library IN LISTS libraries missing)
    if(library MATCHES "dnnl|gomp|omp|fmt|json")
      message(FATAL_ERROR "fovea::ops needs ${library}")
    endif()
  endforeach()
endif()
