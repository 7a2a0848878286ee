#!/bin/sh
# Write the package's programs into a folder. They start Python isolated (-I), because root may run them in any folder.
set -eu
mkdir -p "$1"
for program in qgpud=qgpu.daemon.main qgpuctl=qgpu.cli.main qgpu-load=qgpu.load.main; do
	name=${program%%=*}
	printf '#!/usr/lib/qgpu/bin/python -I\nfrom %s import main\n\nmain()\n' "${program#*=}" >"$1/$name"
	chmod 755 "$1/$name"
done
