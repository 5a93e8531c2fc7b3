#!/bin/busybox sh
# The first process of the emulated machine: one subsystem and one namespace for each disk, behind one NVMe/TCP
# port. Then it runs the lines that come by the second serial port, and says how each ended.
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/sbin:/usr/bin LC_ALL=C
for module in $(cat /modules/order); do insmod "/modules/$module" || echo "FAILED $module"; done
mount -t configfs none /sys/kernel/config
ifconfig lo 127.0.0.1 up
ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up
route add default gw 10.0.2.2

nvmet=/sys/kernel/config/nvmet
mkdir $nvmet/ports/1
echo ipv4 > $nvmet/ports/1/addr_adrfam
echo tcp > $nvmet/ports/1/addr_trtype
echo 0.0.0.0 > $nvmet/ports/1/addr_traddr
echo 4420 > $nvmet/ports/1/addr_trsvcid
number=0
for disk in /dev/vd?; do
  subsystem=$nvmet/subsystems/nqn.2026-11.test:s$number
  mkdir $subsystem
  echo 1 > $subsystem/attr_allow_any_host
  mkdir $subsystem/namespaces/1
  echo -n $disk > $subsystem/namespaces/1/device_path
  echo 2f6b2a1c-5f0e-4b9b-9d6a-00000000000$number > $subsystem/namespaces/1/device_uuid  # the same after a restart
  echo 1 > $subsystem/namespaces/1/enable
  ln -s $subsystem $nvmet/ports/1/subsystems/
  number=$((number + 1))
done

stty -F /dev/ttyS1 raw -echo
exec 3<>/dev/ttyS1
echo "READY $number" >&3
while read -r line <&3; do
  eval "$line" >&3 2>&1 </dev/null
  echo "ENDED $?" >&3
done
