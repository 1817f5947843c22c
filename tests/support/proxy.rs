//! A TCP proxy between a client and a server that stalls, resets, and understands enough of the
//! protocol to lose or falsify the answer to one statement of ours.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use leasehold::postgres::Config;

use super::Server;

/// What happens to a statement. In each case the server has carried it out.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The answer is an error.
    Error,
    /// There is no answer.
    Silence,
    /// The connection is reset instead of an answer.
    Reset,
    /// The booleans in the answer's rows are the opposite.
    Flip,
}

/// Which way bytes go.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    Requests,
    /// From the server to the client.
    Answers,
}

#[derive(Default)]
struct Shared {
    /// The statement's name, how many more times, and what happens.
    faults: Mutex<Vec<(String, usize, Fault)>>,
    stalled: Mutex<Vec<Direction>>,
    changed: Condvar,
    delay: Mutex<Duration>,
    sockets: Mutex<Vec<TcpStream>>,
    links: Mutex<Vec<(TcpStream, Arc<Rounds>)>>,
    accepted: AtomicUsize,
    open: AtomicUsize,
    requested: AtomicU64,
    answered: AtomicU64,
    struck: AtomicUsize,
    ended: AtomicBool,
    deaf: AtomicBool,
}

pub struct Proxy {
    address: SocketAddr,
    base: Config,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    pub fn to(server: &Server) -> Proxy {
        Proxy::between(
            "127.0.0.1:0",
            SocketAddr::from(([127, 0, 0, 1], server.port())),
            server.config(),
        )
    }

    /// A proxy that listens on `listen` and forwards to `target`; `base` is the target's
    /// configuration but for host and port.
    pub fn between(listen: &str, target: SocketAddr, base: Config) -> Proxy {
        let listener = TcpListener::bind(listen).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let acceptor = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || accept(&listener, target, &shared))
        };
        Proxy { address, base, shared, acceptor: Some(acceptor) }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The configuration that goes through the proxy.
    pub fn config(&self) -> Config {
        let mut config = Config::new();
        config.host(&self.address.ip().to_string()).port(self.address.port());
        self.base.get_user().map(|user| config.user(user));
        self.base.get_dbname().map(|name| config.dbname(name));
        config
    }

    /// The next `times` executions of `statement` meet `fault`.
    pub fn strike(&self, statement: &str, times: usize, fault: Fault) {
        self.shared.faults.lock().unwrap().push((statement.into(), times, fault));
    }

    /// How many statements met a fault.
    pub fn struck(&self) -> usize {
        self.shared.struck.load(Ordering::SeqCst)
    }

    /// Has `sql` run in every server session behind the proxy, unknown to its client. They must be
    /// idle.
    pub fn inject(&self, sql: &str) {
        for (server, rounds) in &mut *self.shared.links.lock().unwrap() {
            rounds.lock().unwrap().push_back(Some(INJECTED.to_owned()));
            let mut query = vec![b'Q'];
            query.extend(u32::try_from(sql.len() + 5).unwrap().to_be_bytes());
            query.extend(sql.as_bytes());
            query.push(0);
            server.write_all(&query).unwrap_or_default();
        }
    }

    /// Forwards nothing any more, and keeps every connection open.
    pub fn stall(&self) {
        *self.shared.stalled.lock().unwrap() = vec![Direction::Requests, Direction::Answers];
    }

    /// Forwards nothing this way any more, and goes on the other way.
    pub fn stall_only(&self, direction: Direction) {
        *self.shared.stalled.lock().unwrap() = vec![direction];
    }

    pub fn resume(&self) {
        self.shared.stalled.lock().unwrap().clear();
        self.shared.changed.notify_all();
    }

    /// Adds a delay to whatever is forwarded.
    pub fn delay(&self, delay: Duration) {
        *self.shared.delay.lock().unwrap() = delay;
    }

    /// Delivers no notification any more.
    pub fn deafen(&self) {
        self.shared.deaf.store(true, Ordering::SeqCst);
    }

    /// Resets every connection, on both sides.
    pub fn reset(&self) {
        for socket in self.shared.sockets.lock().unwrap().drain(..) {
            abort(&socket);
        }
    }

    /// Closes every connection in good order.
    pub fn close(&self) {
        for socket in self.shared.sockets.lock().unwrap().drain(..) {
            socket.shutdown(Shutdown::Both).unwrap_or_default();
        }
    }

    /// How many connections are open.
    pub fn connections(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    /// How many bytes were forwarded this way.
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.shared.bytes(direction).load(Ordering::SeqCst)
    }

    /// How many connections were made so far.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::SeqCst);
        self.resume();
        self.reset();
        // Wakes the acceptor.
        drop(TcpStream::connect(self.address));
        if let Some(acceptor) = self.acceptor.take() {
            assert!(acceptor.join().is_ok() || std::thread::panicking());
        }
    }
}

/// Ends a connection with a RST.
fn abort(socket: &TcpStream) {
    // With clones of the socket in other threads, only a disconnect sends a RST at once: a shutdown
    // would send a FIN before it. Linux 6.4 to 6.6 refuse while another thread reads.
    if rustix::net::connect_unspec(socket).is_err() {
        rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO)).unwrap_or_default();
        socket.shutdown(Shutdown::Both).unwrap_or_default();
    }
}

fn accept(listener: &TcpListener, target: SocketAddr, shared: &Arc<Shared>) {
    for client in listener.incoming() {
        if shared.ended.load(Ordering::SeqCst) {
            return;
        }
        let Ok(client) = client else { continue };
        // A server that is down closes its clients' connections.
        let Ok(server) = TcpStream::connect(target) else { continue };
        shared.accepted.fetch_add(1, Ordering::SeqCst);
        client.set_nodelay(true).unwrap();
        server.set_nodelay(true).unwrap();
        let clones = [client.try_clone().unwrap(), server.try_clone().unwrap()];
        shared.sockets.lock().unwrap().extend(clones);
        let link = Arc::new(Mutex::new(VecDeque::from([None])));
        shared.links.lock().unwrap().push((server.try_clone().unwrap(), Arc::clone(&link)));
        let up = (client.try_clone().unwrap(), server.try_clone().unwrap());
        let (shared_up, link_up) = (Arc::clone(shared), Arc::clone(&link));
        std::thread::spawn(move || forward_requests(up.0, up.1, &shared_up, &link_up));
        let shared = Arc::clone(shared);
        shared.open.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || {
            forward_answers(server, client, &shared, &link);
            shared.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// The statements whose answers are awaited: `None` for rounds that execute none of ours.
type Rounds = Mutex<VecDeque<Option<String>>>;

/// Reads one message: type (0 for the start-up message, which has none) and all its bytes.
fn message(from: &mut TcpStream, typed: bool) -> Option<(u8, Vec<u8>)> {
    let mut bytes = vec![0; if typed { 5 } else { 4 }];
    from.read_exact(&mut bytes).ok()?;
    let kind = if typed { bytes[0] } else { 0 };
    let head = bytes.len();
    let length = u32::from_be_bytes(bytes[head - 4..].try_into().unwrap()) as usize;
    bytes.resize(head + length - 4, 0);
    from.read_exact(&mut bytes[head..]).ok()?;
    Some((kind, bytes))
}

impl Shared {
    fn bytes(&self, direction: Direction) -> &AtomicU64 {
        match direction {
            Direction::Requests => &self.requested,
            Direction::Answers => &self.answered,
        }
    }

    /// Passes a message on.
    fn forward(&self, direction: Direction, to: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
        to.write_all(bytes)?;
        self.bytes(direction).fetch_add(bytes.len() as u64, Ordering::SeqCst);
        Ok(())
    }
}

/// Holds a message back for as long as it has to wait.
fn pause(shared: &Shared, direction: Direction) {
    let delay = *shared.delay.lock().unwrap();
    if !delay.is_zero() {
        std::thread::sleep(delay);
    }
    let mut stalled = shared.stalled.lock().unwrap();
    while stalled.contains(&direction) {
        stalled = shared.changed.wait(stalled).unwrap();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
}

/// The name in the comment at the head of each of our statements.
fn name_of(sql: &str) -> Option<String> {
    let rest = sql.strip_prefix("/* leasehold ")?;
    rest.split_once(' ').map(|(name, _)| name.to_owned())
}

fn forward_requests(mut from: TcpStream, mut to: TcpStream, shared: &Shared, rounds: &Rounds) {
    let mut names = HashMap::<String, Option<String>>::new();
    let (mut bound, mut executed, mut first) = (None, None, true);
    while let Some((kind, bytes)) = message(&mut from, !first) {
        first = false;
        let body = bytes.get(5..).unwrap_or_default();
        match kind {
            b'P' => {
                let statement = text(body);
                let sql = text(&body[statement.len() + 1..]);
                names.insert(statement, name_of(&sql));
            }
            b'B' => {
                let portal = text(body);
                let statement = text(&body[portal.len() + 1..]);
                bound = names.get(&statement).cloned().flatten();
            }
            b'E' => executed = bound.take(),
            b'S' => rounds.lock().unwrap().push_back(executed.take()),
            b'Q' => rounds.lock().unwrap().push_back(name_of(&text(body))),
            _ => {}
        }
        pause(shared, Direction::Requests);
        if shared.forward(Direction::Requests, &mut to, &bytes).is_err() {
            break;
        }
    }
    to.shutdown(Shutdown::Both).unwrap_or_default();
}

/// The fault that the statement meets, if it meets one.
fn fault(shared: &Shared, statement: Option<&String>) -> Option<Fault> {
    if statement.is_some_and(|name| name == INJECTED) {
        return Some(Fault::Silence);
    }
    let mut faults = shared.faults.lock().unwrap();
    let found = faults.iter_mut().find(|(name, times, _)| *times > 0 && statement == Some(name))?;
    found.1 -= 1;
    shared.struck.fetch_add(1, Ordering::SeqCst);
    Some(found.2)
}

/// The name of what [`Proxy::inject`] sends.
const INJECTED: &str = "injected by a test";

/// Flips each column of one byte that is 0 or 1.
fn flip(row: &mut [u8]) {
    let mut at = 7;
    while at + 4 <= row.len() {
        let length = i32::from_be_bytes(row[at..at + 4].try_into().unwrap());
        at += 4;
        if length == 1 && row[at] <= 1 {
            row[at] ^= 1;
        }
        at += usize::try_from(length).unwrap_or(0);
    }
}

const ERROR: &[u8] = b"E\0\0\0\x2eSERROR\0VERROR\0CXX000\0Minjected by a test\0\0";

fn forward_answers(mut from: TcpStream, mut to: TcpStream, shared: &Shared, rounds: &Rounds) {
    let mut current = None;
    while let Some((kind, mut bytes)) = message(&mut from, true) {
        // Notifications, notices and parameters come between answers.
        if kind == b'A' && shared.deaf.load(Ordering::SeqCst) {
            continue;
        }
        let aside = matches!(kind, b'A' | b'N' | b'S');
        if !aside && current.is_none() {
            let round = rounds.lock().unwrap().front().cloned();
            current = Some(round.and_then(|statement| fault(shared, statement.as_ref())));
        }
        let met = current.flatten();
        let ready = kind == b'Z';
        if ready {
            rounds.lock().unwrap().pop_front();
            current = None;
        }
        pause(shared, Direction::Answers);
        if met == Some(Fault::Flip) && kind == b'D' {
            flip(&mut bytes);
        }
        let sent = match met {
            _ if aside => shared.forward(Direction::Answers, &mut to, &bytes),
            None | Some(Fault::Flip) => shared.forward(Direction::Answers, &mut to, &bytes),
            Some(Fault::Error) if ready => to.write_all(ERROR).and_then(|()| to.write_all(&bytes)),
            Some(Fault::Reset) => {
                abort(&to);
                abort(&from);
                return;
            }
            Some(Fault::Error | Fault::Silence) => Ok(()),
        };
        if sent.is_err() {
            break;
        }
    }
    to.shutdown(Shutdown::Both).unwrap_or_default();
}
