#!/bin/sh
# mpi_comm_test.sh MPIRUN PROGRAM: the contract on worlds of 1, 2 and 3, and the
# refusal of a world of the wrong size. Leaves nothing behind.
set -u
mpirun=$1
program=$2
dir=$(mktemp -d) || exit 1
trap 'rm -rf "$dir"' EXIT
export TMPDIR="$dir" OMPI_MCA_btl_vader_backing_directory="$dir"
export OMPI_MCA_btl=self,vader OMPI_MCA_pml=ob1
export OMPI_MCA_hwloc_base_binding_policy=none
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
for n in 1 2 3; do
  timeout 600 "$mpirun" --oversubscribe -n $n "$program" $n || {
    echo "FAILED: world of $n"
    exit 1
  }
done
said=$("$program" 4 2>&1)
case $?:$said in
  3:*"world of 1, expected 4"*) ;;
  *)
    echo "FAILED: a lone process is not refused: $said"
    exit 1
    ;;
esac
# A helper of MPI removes its files a little later.
for _ in $(seq 100); do
  left=$(find "$dir" -type f | head -n 3)
  [ -z "$left" ] && break
  sleep 0.2
done
[ -z "$left" ] || {
  echo "FAILED: left behind: $left"
  exit 1
}
