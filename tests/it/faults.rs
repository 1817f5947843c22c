//! Every fault that a network, a server, a pooler or a stopped process can produce: when the holder
//! knows, when the server lets go, when a standby leads, and for how long two jobs overlapped.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::support::history::{self, Record, Term, overlaps, terms, tokens_out_of_order};
use crate::support::leases::{NAME, PATIENCE, fast, locker};
use crate::support::{Child, History, Net, PgBouncer, Proxy, Server, ends_idle_sessions, look};

const H: Duration = Duration::from_millis(200);
const Q: Duration = Duration::from_millis(600);
const R: Duration = Duration::from_millis(200);
/// `Options::session_ttl`: a tenth more than `H + Q`, at least a second.
const T: Duration = Duration::from_millis(800 + 1000);
/// What scheduling on a busy machine adds to a bound.
const NOISE: Duration = Duration::from_millis(150);
/// P2.
const SEEN: Duration = Duration::from_millis(50);

/// P5: how soon a holder behind a cut wire is replaced. Before PostgreSQL 14 it takes TCP's time-outs
/// to end its session, which count in whole seconds.
fn vanished() -> Duration {
    let tcp = if ends_idle_sessions() { Duration::ZERO } else { Duration::from_secs(2) };
    T + R.mul_f64(1.2) + NOISE + tcp
}

/// A holder and a standby that write down what they do, and the fault between them.
struct Scene {
    history: History,
    path: PathBuf,
    _folder: TempDir,
    rows: Vec<Row>,
}

struct Row {
    fault: &'static str,
    /// From the fault to the moment when the holder's job was told.
    told: Duration,
    /// From the fault to the standby's job; `None` if it could not start before the fault was lifted.
    replaced: Option<Duration>,
    overlap: Duration,
}

impl Scene {
    fn new() -> Scene {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("history");
        Scene { history: History::open(&path), path, _folder: folder, rows: Vec::new() }
    }

    fn replica(&self, url: &str, namespace: Option<&str>) -> Child {
        let millis = |d: Duration| d.as_millis().to_string();
        let (h, q, r) = (millis(H), millis(Q), millis(R));
        let history = self.path.to_str().unwrap();
        let environment = [("URL", url), ("HISTORY", history), ("H", &h), ("Q", &q), ("R", &r)];
        match namespace {
            Some(namespace) => Child::spawn_in(namespace, "leader", &environment),
            None => Child::spawn("leader", &environment),
        }
    }

    /// Lets a holder lead through `holder_url` and a standby wait through `standby_url`, strikes, and
    /// measures. `lifted` ends the fault once the holder knows, or once the standby leads.
    fn measure(
        &mut self,
        fault: &'static str,
        holder: (&str, Option<&str>),
        standby_url: &str,
        lift_first: bool,
        strike: impl FnOnce(),
        lift: impl FnOnce(),
    ) -> &Row {
        let holder = self.replica(holder.0, holder.1);
        holder.expect("leads", PATIENCE);
        let standby = self.replica(standby_url, None);
        standby.expect("ready", PATIENCE);
        std::thread::sleep(2 * R);
        let struck = history::now();
        strike();
        holder.expect("stops", PATIENCE);
        let (lift, lifted) = if lift_first { (lift(), true) } else { ((), false) };
        let () = lift;
        // After the fault either may lead: the holder may be back first.
        let deadline = Instant::now() + PATIENCE;
        let records = loop {
            let records = self.since(struck);
            if records.iter().any(|record| record.kind == "start") {
                break records;
            }
            assert!(Instant::now() < deadline, "{fault}: nobody leads again");
            std::thread::sleep(Duration::from_millis(2));
        };
        let at = |kind: &str| {
            let record = records.iter().find(|record| record.kind == kind);
            record.map(|record| Duration::from_nanos(record.at - struck))
        };
        let told = at("stop").expect("the holder stopped");
        let replaced = at("start").filter(|_| !lifted);
        drop((holder, standby));
        let overlap = overlaps(&self.terms()).first().map_or(Duration::ZERO, |found| found.0);
        self.rows.push(Row { fault, told, replaced, overlap });
        self.rows.last().unwrap()
    }

    fn since(&self, start: u64) -> Vec<Record> {
        self.history.read().into_iter().filter(|record| record.at >= start).collect()
    }

    fn terms(&self) -> Vec<Term> {
        // Whoever was ended at the end of a measurement, ended then: nothing of it lasts.
        let records = self.history.read();
        let mut terms = terms(&records, &[]);
        let starts: Vec<u64> = terms.iter().map(|term| term.start).collect();
        for (term, next) in terms.iter_mut().zip(starts.into_iter().skip(1)) {
            term.stop.get_or_insert(next);
        }
        terms
    }

    /// Prints the table, and checks what holds for all rows.
    fn conclude(&self) {
        let mut table =
            format!("{:<42} {:>9} {:>9} {:>9}\n", "fault", "told", "replaced", "overlap");
        for row in &self.rows {
            let replaced = row.replaced.map_or("-".into(), |d| format!("{d:.1?}"));
            let (told, overlap) = (format!("{:.1?}", row.told), format!("{:.1?}", row.overlap));
            writeln!(table, "{:<42} {told:>9} {replaced:>9} {overlap:>9}", row.fault).unwrap();
        }
        std::io::stderr().write_all(table.as_bytes()).unwrap();
        assert_eq!(tokens_out_of_order(&self.terms()), None);
    }
}

#[test]
fn a_session_that_the_server_ended_is_seen_within_50_ms() {
    let mut scene = Scene::new();
    let mut server = Server::start();
    let url = server.url();
    let key = leasehold::key(NAME);
    let row = scene.measure(
        "pg_terminate_backend",
        (&url, None),
        &url,
        false,
        || server.terminate(look::holder_pid(&mut server.client(), key).unwrap()),
        || (),
    );
    assert!(row.told < SEEN + NOISE && row.overlap < SEEN, "{:?}", row.told);
    assert!(row.replaced.unwrap() < R.mul_f64(1.2) + NOISE);
    for how in ["fast stop", "immediate stop", "kill -9 of the server"] {
        let row = scene.measure(
            how,
            (&url, None),
            &url,
            false,
            || {
                match how {
                    "fast stop" => server.stop_fast(),
                    "immediate stop" => server.stop_immediate(),
                    _ => server.kill9(),
                }
                server.start_again();
            },
            || (),
        );
        assert!(row.overlap < SEEN, "{how}: {:?}", row.overlap);
        assert!(look::advisory_locks(&mut server.client()).len() <= 1);
    }
    let proxy = Proxy::to(&server);
    let through = url_through(&proxy);
    let row = scene.measure("RST", (&through, None), &url, false, || proxy.reset(), || ());
    assert!(row.told < SEEN + NOISE && row.overlap < SEEN, "{:?}", row.told);
    let mut pooler = PgBouncer::start(&server, "session", &[]);
    let through = pooler.url();
    let row =
        scene.measure("PgBouncer killed", (&through, None), &url, false, || pooler.kill9(), || ());
    assert!(row.told < SEEN + NOISE && row.overlap < SEEN, "{:?}", row.told);
    scene.conclude();
}

fn url_through(proxy: &Proxy) -> String {
    let config = proxy.config();
    format!("postgres://postgres@127.0.0.1:{}/postgres", config.get_ports()[0])
}

#[test]
fn a_silent_session_is_lost_by_the_clock_without_overlap_and_freed_by_the_server() {
    let net = Net::new();
    let server = Server::builder().listen(&net.server().to_string()).start();
    let mut scene = Scene::new();
    let url = server.url();
    let far = format!("postgres://postgres@{}:{}/postgres", net.server(), server.port());
    let inside = || (far.as_str(), Some(net.name()));
    let known = H + Q + NOISE;
    let freed = vanished();

    let row = scene.measure("wire cut", inside(), &url, false, || net.cut(), || ());
    assert!(row.told < known && row.overlap.is_zero(), "{:?}", row.told);
    assert!(row.replaced.unwrap() < freed, "{:?}", row.replaced);
    net.heal();

    let row = scene.measure(
        "wire unplugged at the server",
        inside(),
        &url,
        false,
        || net.unplug(),
        || (),
    );
    assert!(row.told < known && row.overlap.is_zero(), "{:?}", row.told);
    assert!(row.replaced.unwrap() < freed, "{:?}", row.replaced);
    net.heal();

    let proxy = Proxy::to(&server);
    let through = url_through(&proxy);
    // To a server that does not end idle sessions, the proxy's host is alive, and so is the session.
    let lift = !ends_idle_sessions();
    let row = scene.measure(
        "proxy stalled",
        (&through, None),
        &url,
        lift,
        || proxy.stall(),
        || {
            if lift {
                proxy.resume();
            }
        },
    );
    assert!(row.told < known && row.overlap.is_zero(), "{:?}", row.told);
    assert!(lift || row.replaced.unwrap() < freed, "{:?}", row.replaced);
    proxy.resume();

    let pid = std::cell::Cell::new(0);
    let row = scene.measure(
        "backend stopped",
        (&url, None),
        &url,
        true,
        || {
            pid.set(look::holder_pid(&mut server.client(), leasehold::key(NAME)).unwrap());
            server.freeze_backend(pid.get());
        },
        || server.thaw_backend(pid.get()),
    );
    assert!(row.told < known && row.overlap.is_zero(), "{:?}", row.told);

    let row = scene.measure(
        "all server processes stopped",
        (&url, None),
        &url,
        true,
        || server.freeze(),
        || server.thaw(),
    );
    assert!(row.told < known && row.overlap.is_zero(), "{:?}", row.told);
    scene.conclude();
    look::wait_until("nothing is left", PATIENCE, || {
        look::advisory_locks(&mut server.client()).is_empty()
    });
}

/// P4 and P5, 20 times over.
#[test]
fn partitions_of_the_holder_cause_no_overlap_in_20_rounds() {
    let net = Net::new();
    let server = Server::builder().listen(&net.server().to_string()).start();
    let mut scene = Scene::new();
    let url = server.url();
    let far = format!("postgres://postgres@{}:{}/postgres", net.server(), server.port());
    let mut near = scene.replica(&url, None);
    near.expect("leads", PATIENCE);
    let mut distant = scene.replica(&far, Some(net.name()));
    distant.expect("ready", PATIENCE);
    let mut slowest = Duration::ZERO;
    for _ in 0..20 {
        // The distant one leads, and is cut off; the near one takes over.
        hand_over(&mut near, &distant);
        while near.try_next().is_some() {}
        let cut = Instant::now();
        net.cut();
        let (at, _) = near.expect("leads", PATIENCE);
        slowest = slowest.max(at.saturating_duration_since(cut));
        net.heal();
        distant.expect("stops", PATIENCE);
    }
    assert!(slowest < vanished(), "{slowest:?}");
    distant.hang_up();
    drop((near, distant));
    let terms = scene.terms();
    assert!(terms.len() >= 40, "{}", terms.len());
    assert_eq!(overlaps(&terms), [], "no overlap at all");
    assert_eq!(tokens_out_of_order(&terms), None);
    scene.rows.clear();
}

#[test]
fn a_run_goes_on_after_its_process_was_stopped_past_the_deadline() {
    let server = Server::start();
    let url = server.url();
    let environment = [("URL", url.as_str()), ("TTL_OFF", "1"), ("H", "100"), ("Q", "400")];
    let elsewhere = locker(&server, fast());
    for _ in 0..5 {
        let other = elsewhere.acquire_timeout("other", PATIENCE).unwrap().unwrap();
        let mut replica = Child::spawn("two_names", &environment);
        let (_, first) = replica.expect(NAME, PATIENCE);
        // The run of the other name is waiting, and could be granted as the first thing after.
        std::thread::sleep(Duration::from_millis(300));
        replica.stop();
        other.release().unwrap();
        std::thread::sleep(Duration::from_millis(1500));
        replica.cont();
        let mut news = [replica.next(PATIENCE).1, replica.next(PATIENCE).1];
        news.sort();
        let [again, other] = &news;
        assert!(again.starts_with(NAME) && !again.ends_with(&first), "a new term: {news:?}");
        assert!(other.starts_with("other"), "{news:?}");
        replica.hang_up();
        assert_eq!(replica.expect("ended", PATIENCE).1, "Ok(()) Ok(())");
        assert!(replica.wait(PATIENCE).success());
    }
}

/// Has `leader` yield until `standby` leads.
fn hand_over(leader: &mut Child, standby: &Child) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        leader.send("yield");
        let end = Instant::now() + Duration::from_millis(300);
        while Instant::now() < end {
            if standby.try_next().is_some_and(|(_, line)| line.starts_with("leads")) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(Instant::now() < deadline, "the standby does not take over");
    }
}

#[test]
fn a_holder_stopped_past_its_time_to_live_is_replaced_and_knows_it_at_its_first_look() {
    let server = Server::start();
    let environment = [("URL", server.url()), ("H", "200".into()), ("Q", "600".into())];
    let environment: Vec<(&str, &str)> =
        environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    for _ in 0..3 {
        let mut holder = Child::spawn("holder", &environment);
        holder.expect("holds", PATIENCE);
        holder.send("?");
        assert_eq!(holder.expect("held", PATIENCE).1, "true");
        let key = leasehold::key(NAME);
        holder.stop();
        let start = Instant::now();
        if ends_idle_sessions() {
            let freed = look::wait_until("the server lets go", PATIENCE, || {
                look::holder_pid(&mut server.client(), key).is_none()
            });
            assert!(freed < T + NOISE, "{freed:?}");
        } else {
            std::thread::sleep(2 * T);
            assert!(look::holder_pid(&mut server.client(), key).is_some(), "it cannot know");
        }
        // Asked while it is stopped, answered as the first thing after: before any I/O.
        holder.send("?");
        holder.cont();
        let (_, answer) = holder.expect("held", PATIENCE);
        // Either it saw the deadline passed, or the end of its session.
        assert!(answer.starts_with("false lease lost: "), "{answer}");
        assert!(start.elapsed() < PATIENCE);
        holder.hang_up();
        assert!(holder.wait(PATIENCE).success());
    }
}
