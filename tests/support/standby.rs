//! Hot standbys, made with the server's own functions: `pg_basebackup` of one version does not work
//! with every other, and is not part of every package.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::time::Duration;

use leasehold::postgres::SimpleQueryMessage;

use super::Server;
use super::look;
use super::server::{account, command_as_account, folder};

impl Server {
    /// A hot standby that streams from this server.
    pub fn standby(&self) -> Server {
        let folder = folder();
        let mut client = self.client();
        let version = self.version_num();
        let [begin, end] = if version >= 150_000 {
            [
                "SELECT pg_backup_start('standby', true)",
                "SELECT labelfile FROM pg_backup_stop(false)",
            ]
        } else {
            [
                "SELECT pg_start_backup('standby', true, false)",
                "SELECT labelfile FROM pg_stop_backup(false, false)",
            ]
        };
        client.batch_execute(begin).unwrap();
        let out = command_as_account(Path::new("cp"))
            .arg("-a")
            .args([&self.data(), folder.path()])
            .output()
            .unwrap();
        // Files may come and go while a server is copied; its log makes up for it.
        let error = String::from_utf8_lossy(&out.stderr);
        let vanished = |line: &str| line.contains("No such file or directory");
        assert!(out.status.success() || error.lines().all(vanished), "cp: {error}");
        let answer = client.simple_query(end).unwrap();
        let label = answer.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0),
            _ => None,
        });
        let data = folder.path().join("data");
        fs::remove_file(data.join("postmaster.pid")).unwrap_or_default();
        for (name, text) in [("backup_label", label.unwrap()), ("standby.signal", "")] {
            fs::write(data.join(name), text).unwrap();
            if let Some((uid, gid)) = account() {
                chown(data.join(name), Some(uid), Some(gid)).unwrap();
            }
        }
        Server::builder()
            .conf("primary_conninfo", &format!("host=127.0.0.1 port={} user=postgres", self.port()))
            .start_in(folder)
    }

    /// A standby that this server waits for at each commit.
    pub fn synchronous_standby(&self) -> Server {
        let standby = self.standby();
        let mut client = self.client();
        client.batch_execute("ALTER SYSTEM SET synchronous_standby_names = '*'").unwrap();
        client.batch_execute("SELECT pg_reload_conf()").unwrap();
        look::wait_until("the standby is synchronous", Duration::from_secs(30), || {
            let synchronous = "SELECT FROM pg_stat_replication WHERE sync_state = 'sync'";
            !client.query(synchronous, &[]).unwrap().is_empty()
        });
        standby
    }

    /// Makes a standby the primary of a new timeline.
    pub fn promote(&self) {
        let done: bool =
            self.client().query_one("SELECT pg_promote(true, 30)", &[]).unwrap().get(0);
        assert!(done, "not promoted");
    }
}
