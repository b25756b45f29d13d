#!/usr/bin/env bash
# build.sh cpu|cuda OUT: builds the server, ssmctl and the demo in a bare Debian root, and lays out in OUT what a runtime
# image needs: bin/, share/ssmd/models, share/ssmd/demo, and packages.txt, the Debian packages whose libraries they load.
# What the Dockerfile's build stages and `make container-check` run. As root: it installs packages.
set -euo pipefail
backend=$1 out=$2
cd "$(dirname "$0")/../.."

# What building needs of tools/packages.txt: not what only tests and formatting do.
packages=$(grep -E '^(build-essential|ca-certificates|cmake|mold|ninja-build|protobuf-compiler.*|.*-dev)$' tools/packages.txt |
  grep -vE '^(libbenchmark|libgmock|libgtest)-dev$')
cuda=OFF
[ "$backend" = cuda ] && cuda=ON packages="$packages python3-pip"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086  # a list
apt-get install -q -y --no-install-recommends $packages

[ "$backend" = cuda ] && tools/install_nvcc
cmake --preset release -DSSMD_CUDA=$cuda
cmake --build --preset release --target ssmd-server ssmctl ssmd-demo

mkdir -p "$out/bin" "$out/share/ssmd/demo"
for binary in service/ssmd-server client/ctl/ssmctl client/demo/ssmd-demo; do
  strip -o "$out/bin/$(basename "$binary")" "build/release/$binary"
done
install -m 0755 deploy/container/healthcheck "$out/bin/"
install -m 0755 deploy/container/runtime.sh "$out/"
cp -r deploy/models "$out/share/ssmd/"
cp client/demo/weights/hybrid-kjv.safetensors client/demo/text/heldout.txt "$out/share/ssmd/demo/"

# Libraries to packages. ldd names /lib, dpkg may know the file as /usr/lib or the reverse.
ldd "$out"/bin/ssm* | awk '$2 == "=>" {print $3}' | sort -u | while read -r library; do
  real=$(readlink -f "$library")
  { dpkg-query -S "$real" || dpkg-query -S "${real#/usr}"; } 2>/dev/null | sed 's/:.*//'
done | sort -u >"$out/packages.txt"
