#!/bin/sh
# Write the packages' programs into a folder: launchers.sh PYTHON FOLDER PROGRAM=MODULE... They start Python in isolated
# mode (-I), because root may run them in any folder.
set -eu
python=$1
folder=$2
shift 2
mkdir -p "$folder"
for program; do
	printf '#!%s -I\nfrom qgpu.start import run\n\nrun("%s")\n' "$python" "${program#*=}" >"$folder/${program%%=*}"
	chmod 755 "$folder/${program%%=*}"
done
