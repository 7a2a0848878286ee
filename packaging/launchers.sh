#!/bin/sh
# Write programs of the packages into a folder: launchers.sh FOLDER PROGRAM=MODULE... They start Python isolated (-I),
# because root may run them in any folder.
set -eu
folder=$1
shift
mkdir -p "$folder"
for program; do
	printf '#!/usr/lib/qgpu/bin/python -I\nfrom qgpu.start import run\n\nrun("%s")\n' "${program#*=}" >"$folder/${program%%=*}"
	chmod 755 "$folder/${program%%=*}"
done
