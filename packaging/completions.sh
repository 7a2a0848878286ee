#!/bin/sh
# Write the shell completions of qgpuctl: completions.sh PYTHON SHARE (such as /usr/share).
set -eu
for place in bash=bash-completion/completions/qgpuctl zsh=zsh/vendor-completions/_qgpuctl fish=fish/vendor_completions.d/qgpuctl.fish; do
	file=$2/${place#*=}
	mkdir -p "$(dirname "$file")"
	"$1" -B -I -m qgpu.cli.main completion "${place%%=*}" >"$file"
done
