#!/usr/bin/env bash
# runtime.sh BUILT: turns a bare Debian root into the image: the libraries that BUILT/packages.txt names, what build.sh laid
# out, and the user that it all runs as. What the Dockerfile's runtime stage and `make container-check` run. As root.
set -euo pipefail
built=$1
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
xargs apt-get install -q -y --no-install-recommends <"$built/packages.txt"
rm -rf /var/lib/apt/lists/*

# The number is in Kubernetes' manifests too: runAsNonRoot wants a number.
groupadd --system --gid 65532 ssmd
useradd --system --uid 65532 --gid ssmd --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin ssmd

install -m 0755 -t /usr/local/bin "$built/bin/ssmd-server" "$built/bin/ssmctl" "$built/bin/healthcheck"
mkdir -p /usr/local/share/ssmd
cp -r "$built/share/ssmd/models" /usr/local/share/ssmd/
install -d -o ssmd -g ssmd -m 0750 /run/ssmd
