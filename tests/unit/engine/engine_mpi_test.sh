#!/bin/sh
# engine_mpi_test.sh MPIRUN PROGRAM [CASES [SEED]]: random meshes of 2 and of 4
# processes. Leaves nothing behind.
set -u
mpirun=$1
program=$2
shift 2
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
export TMPDIR="$dir" OMPI_MCA_btl_vader_backing_directory="$dir"
export OMPI_MCA_btl=self,vader OMPI_MCA_pml=ob1
export OMPI_MCA_hwloc_base_binding_policy=none OMPI_MCA_mpi_yield_when_idle=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for n in 2 4; do
  timeout 600 "$mpirun" --oversubscribe -n $n "$program" $n "$@" || {
    echo "FAILED: world of $n"
    exit 1
  }
done
