//! Replicas as processes: the body of a child, and hand-overs between two of them.

use std::path::Path;
use std::time::{Duration, Instant};

use leasehold::postgres::{Client, Config, IsolationLevel, NoTls};
use leasehold::{CancellationToken, Lease, Locker, SessionTtl};
use tempfile::TempDir;

use crate::support::child::{self, report};
use crate::support::history::{self, overlaps, terms, tokens_out_of_order};
use crate::support::leases::{NAME, PATIENCE, fast};
use crate::support::{Child, History, Server, look};

/// What a child does. Every child ends when its standard input does.
fn run_role(role: &str) {
    let url = std::env::var("URL").unwrap();
    let millis = |name: &str, default: u64| {
        let given = std::env::var(name).map_or(default, |value| value.parse().unwrap());
        Duration::from_millis(given)
    };
    let options = fast()
        .watch(std::env::var("WATCH").is_ok())
        .heartbeat_interval(millis("H", 200))
        .query_timeout(millis("Q", 1000))
        .retry_interval(millis("R", 200))
        .session_ttl(std::env::var("TTL_OFF").map_or(SessionTtl::Auto, |_| SessionTtl::Off))
        .application_name("replica");
    let history = std::env::var("HISTORY").map(|path| History::open(Path::new(&path)));
    let locker = Locker::new(url.parse().unwrap(), options).unwrap();
    let stop = CancellationToken::new();
    let commands = {
        let (sender, commands) = crossbeam_channel::unbounded();
        let stop = stop.drop_guard();
        std::thread::spawn(move || {
            let _stop = stop;
            for line in std::io::stdin().lines().map_while(Result::ok) {
                sender.send(line).unwrap_or_default();
            }
        });
        commands
    };
    report("ready");
    match role {
        // Leads until told to yield, again and again; writes its terms down.
        "leader" => {
            let job = |lease: &Lease| -> Result<(), std::convert::Infallible> {
                if let Ok(history) = &history {
                    history.record("start", lease.name(), lease.token());
                }
                // What was meant for an earlier term is not for this one.
                while commands.try_recv().is_ok() {}
                report(&format!("leads {}", lease.token()));
                while commands.try_recv().is_err() && !lease.wait_timeout(Duration::from_millis(2))
                {
                }
                if let Ok(history) = &history {
                    history.record("stop", lease.name(), lease.token());
                }
                report(&format!("stops {}", lease.token()));
                Ok(())
            };
            // After a term of its own will, it lets others have a turn.
            while !stop.wait_timeout(Duration::from_millis(20)) {
                locker.run(&stop, NAME, job).unwrap();
            }
        }
        // Holds a lease and says what it knows of it when asked.
        "holder" => {
            let guard = locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
            report(&format!("holds {}", guard.token()));
            for _ask in &commands {
                let held = guard.is_held();
                let check = guard.check().err().map(|error| error.to_string());
                report(&format!("held {held} {}", check.unwrap_or_default()));
            }
        }
        // Takes and gives back as fast as it can.
        "taker" => {
            while !stop.is_cancelled() {
                let guard = locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
                let history = history.as_ref().unwrap();
                history.record("start", NAME, guard.token());
                history.record("stop", NAME, guard.token());
                guard.release().unwrap();
            }
        }
        // Leads, and writes under guard until the term is over.
        "writer" => {
            let job = |lease: &Lease| -> Result<(), std::convert::Infallible> {
                report(&format!("leads {}", lease.token()));
                write_under_guard(lease, &url);
                Ok(())
            };
            // A refusal may come before the loss is known here: then the job ends a term it holds.
            while !stop.wait_timeout(Duration::from_millis(1)) {
                locker.run(&stop, NAME, job).unwrap();
            }
        }
        // Leads under two names as soon as it can; says how that ends.
        "two_names" => std::thread::scope(|scope| {
            let job = |lease: &Lease| -> Result<(), ()> {
                report(&format!("{} {}", lease.name(), lease.token()));
                lease.cancellation().wait();
                Ok(())
            };
            let (locker, stop) = (&locker, &stop);
            let other = scope.spawn(move || locker.run(stop, "other", job));
            let outcome = locker.run(stop, NAME, job);
            report(&format!("ended {outcome:?} {:?}", other.join().unwrap()));
        }),
        // Says how long calls took that can have no good outcome.
        "caller" => {
            for what in &commands {
                let start = Instant::now();
                let outcome = match what.as_str() {
                    "ping" => locker.ping(),
                    "try_acquire" => locker.try_acquire(NAME).map(drop),
                    "acquire_timeout" => {
                        locker.acquire_timeout(NAME, Duration::from_millis(300)).map(drop)
                    }
                    "holder" => locker.holder(NAME).map(drop),
                    "step_down" => locker.step_down(NAME).map(drop),
                    "close" => locker.close_timeout(Duration::from_secs(1)),
                    other => panic!("no such call: {other}"),
                };
                let took = start.elapsed().as_millis();
                report(&format!("took {took} {outcome:?}"));
            }
        }
        other => panic!("no such role: {other}"),
    }
    locker.close();
}

/// Guarded transactions at each isolation level in turn; ends when one is refused or broken.
fn write_under_guard(lease: &Lease, url: &str) {
    let Ok(mut client) = url.parse::<Config>().unwrap().connect(NoTls) else { return };
    let levels = [
        IsolationLevel::ReadCommitted,
        IsolationLevel::RepeatableRead,
        IsolationLevel::Serializable,
    ];
    for level in levels.into_iter().cycle() {
        let write = |client: &mut Client| -> Result<(), Box<dyn std::error::Error>> {
            let mut transaction = client.build_transaction().isolation_level(level).start()?;
            // With a snapshot from before the guard.
            transaction.batch_execute("SELECT count(*) FROM writes")?;
            lease.guard(&mut transaction)?;
            let (token, process) = (lease.token().as_i64(), std::process::id().to_string());
            transaction.execute("INSERT INTO writes VALUES ($1, $2)", &[&token, &process])?;
            std::thread::sleep(Duration::from_millis(2));
            Ok(transaction.commit()?)
        };
        match write(&mut client) {
            Ok(()) => report("wrote"),
            Err(error) => return report(&format!("refused {error}")),
        }
    }
}

/// The entry of every child; in the parent, the test of the protocol between the two.
#[test]
fn a_replica_reports_and_ends_with_its_parent() {
    if let Some(role) = child::role() {
        return run_role(&role);
    }
    let server = Server::start();
    let mut child = Child::spawn("leader", &[("URL", &server.url())]);
    child.expect("ready", PATIENCE);
    child.expect("leads", PATIENCE);
    let key = leasehold::key(NAME);
    assert!(look::holder_pid(&mut server.client(), key).is_some());
    child.hang_up();
    assert!(child.wait(PATIENCE).success());
    assert_eq!(look::holder_pid(&mut server.client(), key), None);
}

/// How a term is ended from outside.
#[derive(Copy, Clone, PartialEq)]
enum End {
    Release,
    Kill,
    Terminate,
}

#[test]
fn one_job_at_a_time_over_200_hand_overs_between_processes() {
    hand_overs(2, 200);
}

#[test]
fn no_round_is_lost_in_500_hand_overs_among_five_processes() {
    hand_overs(5, 500);
}

/// Hand-overs between processes, ended in turn by release, by `kill -9` and by
/// `pg_terminate_backend`.
fn hand_overs(processes: usize, rounds: usize) {
    let server = Server::start();
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("history");
    let history = History::open(&path);
    let url = server.url();
    let environment = [("URL", url.as_str()), ("HISTORY", path.to_str().unwrap())];
    let spawn = || Child::spawn("leader", &environment);
    let mut replicas: Vec<Child> = (0..processes).map(|_| spawn()).collect();
    let mut killed = Vec::new();
    let (mut slowest_release, mut slowest_kill) = (Duration::ZERO, Duration::ZERO);
    let mut leader = next_leader(&replicas, PATIENCE).0;
    for round in 0..rounds {
        let end = [End::Release, End::Release, End::Terminate, End::Kill][round % 4];
        let started = Instant::now();
        match end {
            End::Release => replicas[leader].send("yield"),
            End::Terminate => {
                let key = leasehold::key(NAME);
                server.terminate(look::holder_pid(&mut server.client(), key).unwrap());
            }
            End::Kill => {
                let id = replicas[leader].id();
                replicas[leader].kill9();
                killed.push((id, history::now()));
                replicas[leader] = spawn();
            }
        }
        let (next, at) = next_leader(&replicas, PATIENCE);
        let took = at.saturating_duration_since(started);
        match end {
            End::Release => slowest_release = slowest_release.max(took),
            _ => slowest_kill = slowest_kill.max(took),
        }
        leader = next;
    }
    // While they are ended one by one, others may still take over.
    for replica in &mut replicas {
        replica.kill9();
        killed.push((replica.id(), history::now()));
    }
    let records = history.read();
    let by_loss: Vec<_> = records.iter().filter(|record| record.kind == "start").collect();
    let terms = terms(&records, &killed);
    assert!(by_loss.len() > rounds && terms.len() == by_loss.len());
    assert_eq!(tokens_out_of_order(&terms), None);
    // A release overlaps with nothing. After a termination, the job that lost may go on until it
    // is told: P2's 50 ms, and the 2 ms in which it looks.
    let bound = Duration::from_millis(50);
    if let Some((overlap, earlier, later)) = overlaps(&terms).first() {
        assert!(*overlap <= bound, "{overlap:?} between {earlier:?} and {later:?}");
    }
    // Polling: 200 ms and a fifth, and what starting a process takes.
    assert!(slowest_kill < Duration::from_secs(2), "{slowest_kill:?}");
    assert!(slowest_release < Duration::from_secs(1), "{slowest_release:?}");
}

/// Whichever leads next, and when it said so.
fn next_leader(replicas: &[Child], bound: Duration) -> (usize, Instant) {
    let deadline = Instant::now() + bound;
    loop {
        for (n, replica) in replicas.iter().enumerate() {
            while let Some((at, line)) = replica.try_next() {
                if line.starts_with("leads") {
                    return (n, at);
                }
            }
        }
        assert!(Instant::now() < deadline, "nobody leads within {bound:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
