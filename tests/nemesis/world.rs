//! The system under test: one server, replicas, a wire and proxies between them, and the faults done
//! to them. Everything is stopped when it is dropped, also by a panic.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use leasehold::Locker;
use leasehold::postgres::{Client, NoTls};
use tempfile::TempDir;

use crate::draw::Plan;
use crate::record::now;
use crate::replica;
use crate::support::{Child, Net, Proxy, Server, look};
use crate::terms::{FOREVER, Fault, What, Where};

const PATIENCE: Duration = Duration::from_secs(20);

/// The replicas on the far end of the wire; all others are behind a proxy each.
const FAR: [usize; 2] = [0, 1];

pub struct World {
    pub slots: Vec<Slot>,
    pub names: usize,
    pub server: Server,
    pub network: Option<Net>,
    pub killed: HashMap<u32, u64>,
    asker: Locker,
    starving: Vec<(Arc<AtomicBool>, JoinHandle<()>)>,
    folder: TempDir,
}

/// A place for a replica.
pub struct Slot {
    child: Option<Child>,
    proxy: Option<Proxy>,
    far: bool,
}

impl World {
    pub fn new(slots: usize, names: usize) -> World {
        assert!(slots > FAR.len() && names > 0, "at least {} processes and a name", FAR.len() + 1);
        let network = rustix::process::geteuid().is_root().then(Net::new);
        let mut builder = Server::builder().conf("log_min_messages", "warning");
        if let Some(network) = &network {
            builder = builder.listen(&network.server().to_string());
        }
        let server = builder.start();
        server.execute("CREATE TABLE guarded (name text NOT NULL, token int8 NOT NULL)");
        let asker = Locker::new(server.config(), replica::options(99)).unwrap();
        let slots = (0..slots).map(|slot| {
            let far = network.is_some() && FAR.contains(&slot);
            Slot { child: None, proxy: (!far).then(|| Proxy::to(&server)), far }
        });
        let slots = slots.collect();
        let folder = TempDir::new().unwrap();
        let killed = HashMap::new();
        let starving = Vec::new();
        let mut world = World { slots, names, server, network, killed, asker, starving, folder };
        for slot in 0..world.slots.len() {
            world.spawn(slot);
        }
        world
    }

    pub fn history(&self) -> PathBuf {
        self.folder.path().join("history")
    }

    /// A client that looks; bounded, should the server not answer.
    pub fn client(&self) -> Option<Client> {
        let mut config = self.server.config();
        config.connect_timeout(Duration::from_secs(2));
        config.connect(NoTls).ok()
    }

    fn spawn(&mut self, at: usize) {
        let port = self.server.port();
        let address = |host: &str| format!("postgres://postgres@{host}:{port}/postgres");
        let slot = &self.slots[at];
        let network = self.network.as_ref().filter(|_| slot.far);
        let host = network.map_or("127.0.0.1".into(), |network| network.server().to_string());
        let url = match &slot.proxy {
            Some(proxy) => {
                format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.config().get_ports()[0])
            }
            None => address(&host),
        };
        let direct = address(&host)
            + "?application_name=writer&connect_timeout=1&tcp_user_timeout=1\
               &keepalives_idle=1&keepalives_interval=1&keepalives_retries=2";
        let (slot_text, names) = (at.to_string(), self.names.to_string());
        let history = self.history();
        let environment = [
            ("URL", url.as_str()),
            ("DIRECT", &direct),
            ("SLOT", &slot_text),
            ("NAMES", &names),
            ("HISTORY", history.to_str().unwrap()),
        ];
        let child = match network {
            Some(network) => Child::spawn_in(network.name(), "contender", &environment),
            None => Child::spawn("contender", &environment),
        };
        child.expect("ready", PATIENCE);
        self.slots[at].child = Some(child);
    }

    /// The backend and the slot that hold a name; `None` while the server does not say.
    fn holder(&self, name: usize) -> Option<(i32, usize)> {
        let client = &mut self.client()?;
        let key = leasehold::Key::new(leasehold::LEASE_NAMESPACE, &replica::name(name));
        let pid = look::holder_pid(client, key.as_i64())?;
        let text = "SELECT application_name FROM pg_stat_activity WHERE pid = $1";
        let application: String = client.query_opt(text, &[&pid]).ok()??.get(0);
        let slot = application.strip_prefix("nemesis-")?.parse().ok()?;
        (slot < self.slots.len()).then_some((pid, slot))
    }

    /// Which replica a fault of this kind meets.
    pub fn target(&self, plan: &Plan, server_answers: bool) -> usize {
        let at = plan.pick % self.slots.len();
        let holder = if server_answers { self.holder(plan.pick % self.names) } else { None };
        let slot = holder.map_or(at, |(_, slot)| slot);
        let proxied = matches!(plan.what, What::Stall | What::Reset | What::Delay);
        if proxied && self.slots[slot].proxy.is_none() {
            return FAR.len() + slot % (self.slots.len() - FAR.len());
        }
        slot
    }

    /// Puts a fault in place. `None` if it has nothing to strike.
    pub fn inject(&mut self, plan: &Plan, slot: usize) -> Option<Active> {
        let mut begin = now();
        let mut at = Where::Slots(vec![slot]);
        let mut backend = 0;
        match plan.what {
            What::Kill => {
                let child = self.slots[slot].child.as_mut().unwrap();
                let process = child.id();
                child.kill9();
                self.killed.insert(process, now());
            }
            What::Pause => self.slots[slot].child.as_ref().unwrap().stop(),
            What::Terminate => {
                let (pid, slot) = self.holder(plan.pick % self.names)?;
                let mut client = self.client()?;
                begin = now();
                let text = "SELECT pg_terminate_backend($1)";
                if !client.query_one(text, &[&pid]).ok()?.get::<_, bool>(0) {
                    return None;
                }
                at = Where::Slots(vec![slot]);
            }
            What::FreezeBackend => {
                let (pid, slot) = self.holder(plan.pick % self.names)?;
                backend = pid;
                begin = now();
                self.server.freeze_backend(pid);
                at = Where::Slots(vec![slot]);
            }
            What::StepDown => {
                self.asker.step_down(&replica::name(plan.pick % self.names)).ok()?;
                at = Where::Nowhere;
            }
            What::FreezeServer => self.server.freeze(),
            What::StopServer => self.server.stop_fast(),
            What::AbortServer => self.server.stop_immediate(),
            What::CrashServer => self.server.kill9(),
            What::Stall => self.slots[slot].proxy.as_ref()?.stall(),
            What::Reset => self.slots[slot].proxy.as_ref()?.reset(),
            What::Delay => {
                let delay = Duration::from_millis(plan.strength.into());
                self.slots[slot].proxy.as_ref()?.delay(delay);
            }
            What::Cut => self.network.as_ref()?.cut(),
            What::CutIn => self.network.as_ref()?.cut_inbound(),
            What::CutOut => self.network.as_ref()?.cut_outbound(),
            What::Loss => self.network.as_ref()?.lose(f64::from(plan.strength) / 100.0),
            What::Starve => self.starve(),
        }
        match plan.what {
            What::FreezeServer | What::StopServer | What::AbortServer | What::CrashServer => {
                at = Where::Server;
            }
            What::Cut | What::CutIn | What::CutOut | What::Loss => at = Where::Slots(FAR.to_vec()),
            What::Starve => at = Where::Everywhere,
            _ => {}
        }
        let what = plan.what;
        let fault = Fault { what, at, begin, applied: now(), heal: FOREVER, end: FOREVER };
        Some(Active { fault, until: Instant::now() + plan.length, slot, backend })
    }

    /// Takes a fault away.
    pub fn heal(&mut self, active: &mut Active) {
        active.fault.heal = now();
        let slot = active.slot;
        match active.fault.what {
            What::Kill => self.spawn(slot),
            What::Pause => self.slots[slot].child.as_ref().unwrap().cont(),
            What::FreezeBackend => self.server.thaw_backend(active.backend),
            What::FreezeServer => self.server.thaw(),
            What::StopServer | What::AbortServer | What::CrashServer => self.server.start_again(),
            What::Stall => self.slots[slot].proxy.as_ref().unwrap().resume(),
            What::Delay => self.slots[slot].proxy.as_ref().unwrap().delay(Duration::ZERO),
            What::Cut | What::CutIn | What::CutOut | What::Loss => {
                self.network.as_ref().unwrap().heal();
            }
            What::Starve => self.feed(),
            What::Terminate | What::Reset | What::StepDown => {}
        }
        active.fault.end = now();
    }

    /// Twice as many busy threads as processors.
    fn starve(&mut self) {
        let threads = 2 * std::thread::available_parallelism().map_or(2, usize::from);
        for _ in 0..threads {
            let fed = Arc::new(AtomicBool::new(false));
            let end = Arc::clone(&fed);
            let spin = move || {
                while !end.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            };
            self.starving.push((fed, std::thread::spawn(spin)));
        }
    }

    fn feed(&mut self) {
        for (fed, thread) in self.starving.drain(..) {
            fed.store(true, Ordering::Relaxed);
            thread.join().unwrap();
        }
    }

    /// Asks every replica to end, and waits for it.
    pub fn hang_up(&mut self) {
        for slot in &mut self.slots {
            slot.child.as_mut().unwrap().hang_up();
        }
        for (at, slot) in self.slots.iter_mut().enumerate() {
            let status = slot.child.as_mut().unwrap().wait(PATIENCE);
            assert!(status.success(), "replica {at}: {status}");
        }
        self.asker.close();
    }

    /// Locks and sessions that are left on the server after `bound`.
    pub fn leaks(&self, bound: Duration) -> Vec<String> {
        let end = Instant::now() + bound;
        let mut client = self.server.client();
        loop {
            let locks = look::advisory_locks(&mut client);
            let text = "SELECT application_name || ' pid ' || pid || ' ' || state || ' ' || query \
                 FROM pg_stat_activity WHERE application_name LIKE 'nemesis-%'";
            let sessions = client.query(text, &[]).unwrap();
            let locks = locks.iter().map(|lock| format!("{lock:?}"));
            let left: Vec<String> = locks.chain(sessions.iter().map(|row| row.get(0))).collect();
            if left.is_empty() || Instant::now() > end {
                return left;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub fn rows(&self) -> Vec<(usize, i64)> {
        let rows = self.server.client().query("SELECT name, token FROM guarded", &[]).unwrap();
        let name = |text: String| text.strip_prefix("nemesis-").unwrap().parse().unwrap();
        rows.iter().map(|row| (name(row.get(0)), row.get(1))).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for (fed, _) in &self.starving {
            fed.store(true, Ordering::Relaxed);
        }
    }
}

/// A fault that is in place.
pub struct Active {
    pub fault: Fault,
    pub until: Instant,
    slot: usize,
    backend: i32,
}

impl Active {
    /// The two cannot be in place at the same time.
    pub fn excludes(&self, plan: &Plan, slot: usize) -> bool {
        let server = |what| {
            use What::{AbortServer, CrashServer, FreezeBackend, FreezeServer, StopServer};
            use What::{StepDown, Terminate};
            matches!(what, AbortServer | CrashServer | FreezeBackend | FreezeServer)
                || matches!(what, StopServer | StepDown | Terminate)
        };
        let wire = |what| matches!(what, What::Cut | What::CutIn | What::CutOut | What::Loss);
        let mine = self.fault.what;
        (server(mine) && server(plan.what))
            || (wire(mine) && wire(plan.what))
            || mine == plan.what
            || (!server(mine) && !server(plan.what) && !wire(plan.what) && self.fault.strikes(slot))
    }

    /// The server cannot be asked meanwhile.
    pub fn silences_server(&self) -> bool {
        self.fault.at == Where::Server
    }
}
