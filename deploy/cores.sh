#!/bin/sh
# Prints how many cores this process may use: those of its affinity mask, less
# if a CPU quota of its control group (a container's limit) allows fewer, and
# not more than one per GiB of memory, which a compilation can need.
cores=$(nproc)
at_most() { [ "$1" -ge "$cores" ] || cores=$1; }
group=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup 2>/dev/null)
while :; do
  if [ -r "$group/cpu.max" ]; then
    read -r quota period < "$group/cpu.max"
    [ "$quota" = max ] || at_most $(((quota + period - 1) / period))
  fi
  if [ -r "$group/memory.max" ]; then
    read -r bytes < "$group/memory.max"
    [ "$bytes" = max ] || at_most $((bytes >> 30))
  fi
  case "$group" in /sys/fs/cgroup/?*) group=${group%/*} ;; *) break ;; esac
done
old=/sys/fs/cgroup/cpu
if [ -r $old/cpu.cfs_quota_us ] && [ "$(cat $old/cpu.cfs_quota_us)" -gt 0 ]; then
  period=$(cat $old/cpu.cfs_period_us)
  at_most $((($(cat $old/cpu.cfs_quota_us) + period - 1) / period))
fi
at_most $(($(sed -n 's/^MemAvailable: *\([0-9]*\).*/\1/p' /proc/meminfo) >> 20))
[ "$cores" -ge 1 ] || cores=1
echo "$cores"
