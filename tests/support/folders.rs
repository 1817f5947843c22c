//! Folders of throw-away servers.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;

use tempfile::TempDir;

use super::server::account;

/// A new folder that the servers' account may use.
pub fn folder() -> TempDir {
    let prefix = format!("leasehold-{}-", std::process::id());
    // As the kernel spells it, because processes are found by the folder they work in.
    let base = fs::canonicalize(std::env::temp_dir()).unwrap();
    let folder = tempfile::Builder::new().prefix(&prefix).tempdir_in(base).unwrap();
    if let Some((uid, gid)) = account() {
        chown(folder.path(), Some(uid), Some(gid)).unwrap();
    }
    folder
}

/// Removes the folders of test processes that are gone: what is static is never dropped.
pub fn remove_stale() {
    for entry in fs::read_dir(std::env::temp_dir()).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let process = name.strip_prefix("leasehold-").and_then(|rest| rest.split_once('-'));
        let Some(Ok(process)) = process.map(|(process, _)| process.parse::<u32>()) else {
            continue;
        };
        if !Path::new(&format!("/proc/{process}")).exists() {
            // Another process may be at the same.
            fs::remove_dir_all(entry.path()).unwrap_or_default();
        }
    }
}
