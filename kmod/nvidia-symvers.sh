#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
# nvidia-symvers.sh NVIDIA.KO: writes the line of a Module.symvers that qgpu_rm.ko links against, as NVIDIA's own
# build would have left it: the checksum of nvidia_get_rm_ops out of the installed module. Nothing from 565 on,
# where qgpu.ko finds the (GPL-only) export by itself.
set -eu
ko=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
case $ko in
*.xz) xz -dc "$ko" >"$work/nvidia.ko" ;;
*.zst) zstd -dcq "$ko" >"$work/nvidia.ko" ;;
*) cp "$ko" "$work/nvidia.ko" ;;
esac
cd "$work"
set -- $(nm nvidia.ko | awk '$3 == "__crc_nvidia_get_rm_ops" { print $1, $2 }')
if [ $# -ne 2 ]; then	# built without checksums
	nm nvidia.ko | grep -q ' T nvidia_get_rm_ops$' || exit 0
	crc=00000000
elif [ "$2" = A ]; then
	crc=$1
else
	objcopy -O binary --only-section=__kcrctab nvidia.ko crcs 2>/dev/null
	[ -s crcs ] || exit 0
	crc=$(od -An -tx4 -j "$((0x$1))" -N4 crcs | tr -d ' ')
fi
printf '0x%s\tnvidia_get_rm_ops\tnvidia\tEXPORT_SYMBOL\t\n' "$(printf %s "$crc" | tail -c 8)"
