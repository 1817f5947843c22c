//! What the server under test can do.

use std::sync::OnceLock;

use super::server::{binaries, command_as_account};

/// The major version of the binaries under test.
pub fn major() -> u32 {
    static MAJOR: OnceLock<u32> = OnceLock::new();
    *MAJOR.get_or_init(|| {
        let out = command_as_account(&binaries().join("postgres")).arg("--version").output();
        let text = String::from_utf8(out.unwrap().stdout).unwrap();
        // postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)
        let version = text.split_whitespace().nth(2).unwrap();
        let digits = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
        version[..digits].parse().unwrap()
    })
}

/// Whether the server ends sessions from which it hears nothing: PostgreSQL 14 and later. Without it
/// a stopped holder keeps its leases, and one behind a cut wire until TCP gives up.
pub fn ends_idle_sessions() -> bool {
    major() >= 14
}
