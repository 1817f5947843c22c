//! PgBouncer in front of a server.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use leasehold::postgres::{Client, Config, NoTls};
use rustix::process::Signal;
use tempfile::TempDir;

use super::Server;
use super::keeper::{Keeper, kill_all, signal_all};
use super::server::{account, command_as_account, folder, free_port};

pub struct PgBouncer {
    /// Dropped before the folder that it keeps.
    #[expect(dead_code, reason = "works by being there")]
    keeper: Keeper,
    folder: TempDir,
    port: u16,
    process: Option<Child>,
}

impl PgBouncer {
    /// A pooler in `mode`: `session`, `transaction` or `statement`.
    pub fn start(server: &Server, mode: &str, settings: &[(&str, &str)]) -> PgBouncer {
        let folder = folder();
        let port = free_port();
        let mut ini = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\n\
             admin_users = postgres\ndefault_pool_size = 20\nmax_client_conn = 200\nlogfile = {}\n\
             ignore_startup_parameters = extra_float_digits\n",
            server.port(),
            folder.path().join("log").display()
        );
        // With `auth_type = any` the pooler connects as the user that the database line names.
        ini = ini.replace(
            &format!("port={}", server.port()),
            &format!("port={} user=postgres", server.port()),
        );
        for (name, value) in settings {
            ini.push_str(&format!("{name} = {value}\n"));
        }
        let path = folder.path().join("pgbouncer.ini");
        fs::write(&path, ini).unwrap();
        if let Some((uid, gid)) = account() {
            chown(&path, Some(uid), Some(gid)).unwrap();
        }
        let keeper = Keeper::of_folder(folder.path());
        let mut pooler = PgBouncer { keeper, folder, port, process: None };
        pooler.start_again();
        pooler
    }

    pub fn start_again(&mut self) {
        let program = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/usr/local/bin/pgbouncer"];
        let program = program.into_iter().map(Path::new).find(|path| path.exists());
        let program =
            program.expect("PgBouncer is missing: install it (Debian: apt-get install pgbouncer)");
        let process = command_as_account(program)
            .arg("-q")
            .arg(self.folder.path().join("pgbouncer.ini"))
            // Its processes are found by where they work.
            .current_dir(self.folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some(process);
        let deadline = Instant::now() + Duration::from_secs(20);
        while let Err(error) = self.config().connect(NoTls) {
            let ended = self.process.as_mut().unwrap().try_wait().unwrap();
            assert!(
                ended.is_none() && Instant::now() < deadline,
                "the pooler does not start: {ended:?}, {error}\n{}",
                self.log()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub fn config(&self) -> Config {
        self.url().parse().unwrap()
    }

    pub fn kill9(&mut self) {
        if let Some(mut process) = self.process.take() {
            kill_all(self.folder.path(), &mut process);
        }
    }

    /// A client of the server, through the pooler.
    pub fn client(&self) -> Client {
        self.config().connect(NoTls).unwrap()
    }

    /// Runs a command of its console, such as `RECONNECT` or `KILL postgres`.
    pub fn admin(&self, command: &str) {
        let mut console = self.config().dbname("pgbouncer").connect(NoTls).unwrap();
        console.batch_execute(command).unwrap();
    }

    /// What the pooler wrote to its log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// SIGSTOP.
    pub fn freeze(&self) {
        signal_all(self.folder.path(), Signal::STOP);
    }

    /// SIGCONT.
    pub fn thaw(&self) {
        signal_all(self.folder.path(), Signal::CONT);
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        self.kill9();
    }
}
