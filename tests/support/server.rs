//! Throw-away PostgreSQL servers.
//!
//! Each runs in a folder of its own, on a port of its own, as another user when the tests run as
//! root, and is stopped when dropped, also by a panic. Should the test process itself be killed, a
//! [`Keeper`] stops the server.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use leasehold::postgres::{Client, Config, NoTls};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

pub use super::folders::folder;

use super::folders;
use super::keeper::{Keeper, ends_within, kill_all};

const START_BOUND: Duration = Duration::from_secs(60);
const STOP_BOUND: Duration = Duration::from_secs(20);

/// The folder of the server's binaries: `LEASEHOLD_TEST_PG_BIN`, or the installed ones.
pub fn binaries() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let complete =
            |folder: &PathBuf| folder.join("initdb").exists() && folder.join("postgres").exists();
        if let Some(folder) = std::env::var_os("LEASEHOLD_TEST_PG_BIN") {
            let folder = PathBuf::from(folder);
            assert!(complete(&folder), "no initdb and postgres in {}", folder.display());
            return folder;
        }
        let configured = Command::new("pg_config").arg("--bindir").output().ok();
        let configured =
            configured.map(|out| PathBuf::from(String::from_utf8_lossy(&out.stdout).trim()));
        let installed = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
        let mut installed: Vec<PathBuf> =
            installed.map(|version| version.path().join("bin")).collect();
        // By number: 9.6 is older than 15.
        installed.sort_by_key(|folder| {
            let version = folder.parent().and_then(Path::file_name).and_then(|name| name.to_str());
            version.and_then(|name| name.split('.').next()?.parse::<u32>().ok())
        });
        let path = std::env::var_os("PATH").unwrap_or_default();
        configured
            .into_iter()
            .chain(std::env::split_paths(&path))
            .chain(installed.into_iter().rev())
            .find(complete)
            .expect(
                "PostgreSQL's server is missing: install it (Debian: apt-get install postgresql), \
                 or set LEASEHOLD_TEST_PG_BIN to the folder of initdb and postgres",
            )
    })
}

/// The account that servers run under: PostgreSQL refuses to run as root.
pub fn account() -> Option<(u32, u32)> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let accounts = fs::read_to_string("/etc/passwd").unwrap();
    let ids = |name: &str| {
        let line = accounts.lines().find(|line| line.starts_with(&format!("{name}:")))?;
        let fields: Vec<&str> = line.split(':').collect();
        Some((fields[2].parse().unwrap(), fields[3].parse().unwrap()))
    };
    Some(ids("postgres").or_else(|| ids("nobody")).expect("no account postgres or nobody"))
}

/// A command that runs as [`account`].
pub fn command_as_account(program: &Path) -> Command {
    let mut command = Command::new(program);
    if let Some((uid, gid)) = account() {
        command.uid(uid).gid(gid);
    }
    // Binaries that were unpacked somewhere bring their libraries along.
    if let Some(lib) = program.parent().and_then(Path::parent).map(|dir| dir.join("lib")) {
        command.env("LD_LIBRARY_PATH", lib);
    }
    command.current_dir("/").env("LC_ALL", "C.UTF-8").stdin(Stdio::null());
    command
}

/// An empty cluster, made once: `initdb` takes longer than everything else here.
fn template() -> &'static Path {
    // A static is never dropped: its keeper removes the folder, also after a normal exit.
    static TEMPLATE: OnceLock<(PathBuf, Keeper)> = OnceLock::new();
    let (folder, _) = TEMPLATE.get_or_init(|| {
        folders::remove_stale();
        let folder = folder();
        let keeper = Keeper::of_folder(folder.path());
        let out = command_as_account(&binaries().join("initdb"))
            .args(["-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync", "-D"])
            .arg(folder.path().join("data"))
            .output()
            .unwrap();
        assert!(out.status.success(), "initdb: {}", String::from_utf8_lossy(&out.stderr));
        (folder.keep(), keeper)
    });
    folder
}

/// A port that was free a moment ago.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// What a [`Server`] is started with.
#[derive(Default)]
pub struct Builder {
    settings: Vec<(String, String)>,
    hba: Vec<String>,
    listen: Vec<String>,
    files: Vec<(String, String)>,
}

impl Builder {
    /// A line of `postgresql.conf`.
    pub fn conf(mut self, name: &str, value: &str) -> Builder {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// A line of `pg_hba.conf`, before the lines that trust everybody.
    pub fn hba(mut self, line: &str) -> Builder {
        self.hba.push(line.into());
        self
    }

    /// One more address to listen on.
    pub fn listen(mut self, address: &str) -> Builder {
        self.listen.push(address.into());
        self
    }

    /// A file in the data folder that only the server may read.
    pub fn file(mut self, name: &str, content: &str) -> Builder {
        self.files.push((name.into(), content.into()));
        self
    }

    pub fn start(self) -> Server {
        let folder = folder();
        let copied = command_as_account(Path::new("cp"))
            .arg("-a")
            .arg(template().join("data"))
            .arg(folder.path())
            .status();
        assert!(copied.unwrap().success());
        self.start_in(folder)
    }

    /// Starts a server on the cluster in `folder`/data.
    pub fn start_in(self, folder: TempDir) -> Server {
        let data = folder.path().join("data");
        let mut conf = fs::read_to_string(data.join("postgresql.conf")).unwrap();
        let mut addresses = vec!["127.0.0.1".to_owned()];
        addresses.extend(self.listen);
        let own = [
            ("listen_addresses", addresses.join(",")),
            ("unix_socket_directories", folder.path().display().to_string()),
            ("shared_buffers", "16MB".into()),
            ("log_line_prefix", "%m [%p] %a ".into()),
            ("log_min_messages", "info".into()),
        ];
        let own = own.map(|(name, value)| (name.to_owned(), value));
        for (name, value) in own.into_iter().chain(self.settings) {
            conf.push_str(&format!("{name} = '{value}'\n"));
        }
        fs::write(data.join("postgresql.conf"), conf).unwrap();
        for (name, content) in self.files {
            let path = data.join(name);
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            if let Some((uid, gid)) = account() {
                chown(&path, Some(uid), Some(gid)).unwrap();
            }
        }
        let trusted =
            "host all all all trust\nhost replication all all trust\nlocal all all trust\n";
        let hba = self.hba.join("\n") + "\n" + trusted;
        fs::write(data.join("pg_hba.conf"), hba).unwrap();
        let keeper = Keeper::of_folder(folder.path());
        let mut server = Server { postmaster: None, keeper, folder, port: 0 };
        for attempt in 1.. {
            server.port = free_port();
            let Err(why) = server.try_start() else { break };
            // Between our look and the server's, somebody else took the port.
            assert!(attempt < 5 && why.contains("Address already in use"), "{why}");
        }
        server
    }
}

/// A running server, and after a stop the folder it can be started from again.
pub struct Server {
    postmaster: Option<Child>,
    /// Dropped before the folder that it keeps.
    #[expect(dead_code, reason = "works by being there")]
    keeper: Keeper,
    folder: TempDir,
    port: u16,
}

impl Server {
    pub fn start() -> Server {
        Server::builder().start()
    }

    pub fn builder() -> Builder {
        Builder::default()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// The folder of the Unix socket.
    pub fn socket_folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub fn config(&self) -> Config {
        self.url().parse().unwrap()
    }

    /// A client to look with.
    pub fn client(&self) -> Client {
        self.config().connect(NoTls).unwrap()
    }

    pub fn execute(&self, sql: &str) {
        self.client().batch_execute(sql).unwrap();
    }

    pub fn pid(&self) -> Pid {
        let postmaster = self.postmaster.as_ref().expect("the server is stopped");
        Pid::from_raw(i32::try_from(postmaster.id()).unwrap()).unwrap()
    }

    /// Starts a stopped server again, on the same port.
    pub fn start_again(&mut self) {
        self.try_start().unwrap_or_else(|why| panic!("{why}"));
    }

    fn try_start(&mut self) -> Result<(), String> {
        assert!(self.postmaster.is_none(), "the server runs already");
        let log = fs::File::options().create(true).append(true).open(self.log_file()).unwrap();
        let child = command_as_account(&binaries().join("postgres"))
            .arg("-D")
            .arg(self.data())
            .args(["-p", &self.port.to_string()])
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn();
        self.postmaster = Some(child.unwrap());
        let deadline = Instant::now() + START_BOUND;
        while !self.is_ready() || self.config().connect(NoTls).is_err() {
            let ended = self.postmaster.as_mut().unwrap().try_wait().unwrap();
            if ended.is_some() || Instant::now() > deadline {
                self.kill9();
                return Err(format!("the server does not start: {ended:?}\n{}", self.log()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Whether our postmaster says that it accepts connections. On its port alone, another server
    /// may answer.
    fn is_ready(&self) -> bool {
        let Ok(file) = fs::read_to_string(self.data().join("postmaster.pid")) else { return false };
        let mut lines = file.lines().map(str::trim);
        lines.next() == Some(&self.pid().as_raw_nonzero().to_string())
            && lines.nth(6) == Some("ready")
    }

    fn log_file(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// What the server wrote to its log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// What the server writes to its log while `f` runs.
    pub fn log_during(&self, f: impl FnOnce()) -> String {
        let mut file = fs::File::open(self.log_file()).unwrap();
        file.seek(SeekFrom::End(0)).unwrap();
        f();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        text
    }

    /// Stops in good order: sessions are ended, then a checkpoint.
    pub fn stop_fast(&mut self) {
        self.stop(Signal::INT);
    }

    /// Stops at once, without a checkpoint: the next start recovers.
    pub fn stop_immediate(&mut self) {
        self.stop(Signal::QUIT);
    }

    /// A crash of everything: `kill -9` of the postmaster and of each of its children.
    pub fn kill9(&mut self) {
        let mut child = self.postmaster.take().expect("the server is stopped");
        kill_all(&self.data(), &mut child);
    }

    fn stop(&mut self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
        self.reap();
    }

    /// Waits for the end of a server that was told to stop; a frozen backend may keep it from that.
    fn reap(&mut self) {
        let Some(mut child) = self.postmaster.take() else { return };
        ends_within(&mut child, STOP_BOUND);
        kill_all(&self.data(), &mut child);
    }

    /// `pg_terminate_backend`.
    pub fn terminate(&self, pid: i32) {
        let done: bool =
            self.client().query_one("SELECT pg_terminate_backend($1)", &[&pid]).unwrap().get(0);
        assert!(done, "no backend {pid}");
    }

    /// The version as a number, 150018 for 15.18.
    pub fn version_num(&self) -> i32 {
        let sql = "SELECT current_setting('server_version_num')::int";
        self.client().query_one(sql, &[]).unwrap().get(0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.postmaster.is_some() {
            self.thaw();
            // It may have ended by itself.
            kill_process(self.pid(), Signal::QUIT).unwrap_or_default();
            self.reap();
        }
    }
}
