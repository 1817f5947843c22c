//! A replica: contends for every name, and writes down what its jobs do and believe.

use std::convert::Infallible;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold::postgres::{Client, Config, IsolationLevel, NoTls};
use leasehold::{CancelReason, CancellationToken, Lease, Locker, Options, SessionTtl};

use crate::record::{Kind, Writer, now};
use crate::support::child::{self, report};

pub const HEARTBEAT: Duration = Duration::from_millis(200);
pub const QUERY: Duration = Duration::from_millis(500);
pub const RETRY: Duration = Duration::from_millis(200);
/// Little more than heartbeat and query time-out: a server that frees a lease too soon is caught.
pub const TTL: Duration = Duration::from_millis(900);
/// After a job has returned by itself, others may win.
pub const PAUSE: Duration = Duration::from_millis(100);
/// Between two side effects.
const STEP: Duration = Duration::from_millis(5);

/// Names whose jobs write under `Lease::guard`.
pub fn is_guarded(name: usize) -> bool {
    name % 2 == 0
}

pub fn name(name: usize) -> String {
    format!("nemesis-{name}")
}

/// Every other replica watches.
pub fn options(slot: usize) -> Options {
    Options::new()
        .heartbeat_interval(HEARTBEAT)
        .query_timeout(QUERY)
        .retry_interval(RETRY)
        .session_ttl(SessionTtl::Fixed(TTL))
        .application_name(format!("nemesis-{slot}"))
        .watch(slot % 2 == 1)
        .allow_step_down(true)
}

/// The entry of every child; nothing in the parent.
#[test]
fn a_replica_reports_and_ends_with_its_parent() {
    if child::role().is_some() {
        run();
    }
}

fn run() {
    let get = |key: &str| std::env::var(key).unwrap();
    let slot: usize = get("SLOT").parse().unwrap();
    let names: usize = get("NAMES").parse().unwrap();
    let direct: Config = get("DIRECT").parse().unwrap();
    let history = Writer::open(Path::new(&get("HISTORY")), slot);
    let locker = Locker::new(get("URL").parse().unwrap(), options(slot)).unwrap();
    let stop = CancellationToken::new();
    let guard = stop.clone().drop_guard();
    std::thread::spawn(move || {
        let _guard = guard;
        for _ in std::io::stdin().lines().map_while(Result::ok) {}
    });
    report("ready");
    std::thread::scope(|scope| {
        for name in 0..names {
            let (locker, stop, history, direct) = (&locker, &stop, &history, &direct);
            scope.spawn(move || contend(locker, stop, history, direct, name));
        }
    });
    let start = now();
    locker.close();
    history.write(now(), Kind::Closed, 0, 0, false, now() - start);
}

fn contend(
    locker: &Locker,
    stop: &CancellationToken,
    history: &Writer,
    direct: &Config,
    name: usize,
) {
    let mut table = Table { config: direct, client: None };
    let text = self::name(name);
    while !stop.is_cancelled() {
        let outcome = locker.run(stop, &text, |lease: &Lease| -> Result<(), Infallible> {
            job(lease, history, &mut table, name);
            Ok(())
        });
        outcome.unwrap();
        if stop.wait_timeout(PAUSE) {
            return;
        }
    }
}

fn job(lease: &Lease, history: &Writer, table: &mut Table<'_>, name: usize) {
    let token = lease.token().as_i64();
    let at = now();
    history.write(at, Kind::Start, name, token, lease.is_held(), 0);
    let length = Duration::from_millis(fastrand::u64(300..4000));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if is_guarded(name) {
            let done = &done;
            scope.spawn(move || table.writes(lease, history, name, done));
        }
        let begun = Instant::now();
        let work = || {
            let at = now();
            history.write(at, Kind::Work, name, token, lease.is_held(), 0);
        };
        while begun.elapsed() < length {
            work();
            if lease.wait_timeout(STEP) {
                let lost = matches!(lease.cancellation().reason(), Some(CancelReason::Lost(_)));
                history.write(now(), Kind::Told, name, token, false, u64::from(lost));
                break;
            }
        }
        work();
        done.store(true, Ordering::SeqCst);
    });
    history.write(now(), Kind::Stop, name, token, false, 0);
}

/// Where guarded rows go, over a connection that is kept across terms.
struct Table<'a> {
    config: &'a Config,
    client: Option<Client>,
}

impl Table<'_> {
    fn writes(&mut self, lease: &Lease, history: &Writer, name: usize, done: &AtomicBool) {
        let mut seen = false;
        while !done.load(Ordering::SeqCst) {
            // Refusals and outages are what this is about: the table and the history decide.
            let written = self.write(lease, history, name, &mut seen);
            if written.is_err() && self.client.as_ref().is_some_and(Client::is_closed) {
                self.client = None;
            }
            std::thread::sleep(Duration::from_millis(fastrand::u64(5..40)));
        }
    }

    fn write(
        &mut self,
        lease: &Lease,
        history: &Writer,
        name: usize,
        seen: &mut bool,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let client = match &mut self.client {
            Some(client) => client,
            None => self.client.insert(self.config.connect(NoTls)?),
        };
        let (label, token) = (self::name(name), lease.token().as_i64());
        if !*seen {
            let earlier = "SELECT count(*) FROM guarded WHERE name = $1 AND token < $2";
            let count: i64 = client.query_one(earlier, &[&label, &token])?.get(0);
            history.write(now(), Kind::Seen, name, token, false, u64::try_from(count)?);
            *seen = true;
        }
        let levels = [
            IsolationLevel::ReadCommitted,
            IsolationLevel::RepeatableRead,
            IsolationLevel::Serializable,
        ];
        let level = levels[fastrand::usize(..levels.len())];
        let mut transaction = client.build_transaction().isolation_level(level).start()?;
        lease.guard(&mut transaction)?;
        transaction.execute("INSERT INTO guarded VALUES ($1, $2)", &[&label, &token])?;
        std::thread::sleep(Duration::from_millis(fastrand::u64(0..20)));
        transaction.commit()?;
        Ok(())
    }
}
