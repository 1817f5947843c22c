# Finds, and where possible installs, what the other scripts need. Sourced, not run.
# shellcheck shell=bash

# Says what to install, and ends with 2.
missing() {
    echo "leasehold: $1 is missing, and cannot be installed from here." >&2
    echo "leasehold: $2" >&2
    exit 2
}

# Installs Debian packages, as root; fails where that is not possible.
install_packages() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    echo "leasehold: installing $*" >&2
    # The package would start a server of its own, which nothing here needs.
    if [ ! -e /etc/postgresql-common/createcluster.conf ]; then
        mkdir -p /etc/postgresql-common
        echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
    fi
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -q && apt-get install -q -y --no-install-recommends "$@"; } >&2
}

# Prints the folder of PostgreSQL's server binaries.
postgres_folder() {
    local folder
    for folder in "${LEASEHOLD_TEST_PG_BIN:-}" \
        "$(pg_config --bindir 2>/dev/null)" \
        "$(dirname "$(command -v postgres 2>/dev/null || echo /nowhere/postgres)")" \
        $(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -rV) \
        /usr/pgsql-*/bin /usr/local/pgsql/bin /opt/homebrew/opt/postgresql*/bin; do
        if [ -x "$folder/initdb" ] && [ -x "$folder/postgres" ]; then
            echo "$folder"
            return
        fi
    done
    return 1
}

need_postgres() {
    PG_BIN=$(postgres_folder) && return
    install_packages postgresql && PG_BIN=$(postgres_folder) && return
    missing "PostgreSQL's server (initdb, postgres; 13 or later)" \
        "install it (Debian: apt-get install postgresql), or set LEASEHOLD_TEST_PG_BIN to its bin folder"
}

# need COMMAND PACKAGE
need() {
    PATH=$PATH:/usr/sbin:/sbin
    command -v "$1" >/dev/null && return
    install_packages "$2" && command -v "$1" >/dev/null && return
    missing "$1" "install it (Debian: apt-get install $2)"
}

# Headers and tools of OpenSSL, for the tests of TLS.
need_openssl() {
    need openssl openssl
    need pkg-config pkg-config
    pkg-config --exists openssl && return
    install_packages libssl-dev && pkg-config --exists openssl && return
    missing "OpenSSL's headers" "install them (Debian: apt-get install libssl-dev)"
}

need_cargo() {
    command -v cargo >/dev/null || missing "cargo" "install Rust 1.85 or later, see https://rustup.rs"
    command -v cc >/dev/null || need cc gcc
}
