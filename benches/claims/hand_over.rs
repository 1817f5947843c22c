//! How long a lease is without a holder.

use std::time::{Duration, Instant};

use leasehold::postgres::fallible_iterator::FallibleIterator;
use leasehold::{CancellationToken, Lease, Locker, Options};

use crate::support::child::{self, report};
use crate::support::history::now;
use crate::support::{Child, Server, look};
use crate::table::{self, Samples};

const BOUND: Duration = Duration::from_secs(20);

/// A replica: leads until told to yield, and tells when its job started and returned.
pub(crate) fn replica(role: &str) {
    assert_eq!(role, "leader");
    let url = std::env::var("URL").unwrap();
    let options = Options::new().watch(std::env::var("WATCH").is_ok());
    let locker = Locker::new(url.parse().unwrap(), options).unwrap();
    let stop = CancellationToken::new();
    let (sender, yields) = crossbeam_channel::unbounded();
    let on_eof = stop.drop_guard();
    std::thread::spawn(move || {
        let _on_eof = on_eof;
        for line in std::io::stdin().lines().map_while(Result::ok) {
            sender.send(line).unwrap();
        }
    });
    let job = |lease: &Lease| -> Result<(), ()> {
        report(&format!("started {}", now()));
        let (woken, wake) = crossbeam_channel::bounded::<()>(1);
        let token = lease.cancellation().clone();
        std::thread::spawn(move || {
            token.wait();
            drop(woken);
        });
        crossbeam_channel::select! {
            recv(yields) -> _ => {}
            recv(wake) -> _ => {}
        }
        report(&format!("returned {}", now()));
        Ok(())
    };
    while !stop.is_cancelled() {
        locker.run(&stop, "bench", job).unwrap();
        // The other one's turn.
        if stop.wait_timeout(Duration::from_millis(30)) {
            break;
        }
    }
    child::report("ended");
}

fn stamp(child: &Child, what: &str) -> u64 {
    child.expect(what, BOUND).1.parse().unwrap()
}

/// A bare `NOTIFY` from one client to another that is parked.
fn bare_notify(server: &Server, rounds: usize) -> Samples {
    let (mut ear, mut mouth) = (server.client(), server.client());
    ear.batch_execute("LISTEN bench").unwrap();
    let notify = mouth.prepare("NOTIFY bench").unwrap();
    let (sender, heard) = crossbeam_channel::unbounded();
    let listener = std::thread::spawn(move || {
        for _ in 0..rounds {
            ear.notifications().timeout_iter(BOUND).next().unwrap().unwrap();
            sender.send(Instant::now()).unwrap();
        }
    });
    let samples = (0..rounds).map(|_| {
        std::thread::sleep(Duration::from_millis(2));
        let start = Instant::now();
        mouth.execute(&notify, &[]).unwrap();
        heard.recv().unwrap() - start
    });
    let samples = Samples::of(samples.collect());
    listener.join().unwrap();
    samples
}

/// From a job's return in one process to the job's start in another.
pub(crate) fn graceful() {
    let server = Server::start();
    let url = server.url();
    let mut replicas =
        [Child::spawn("leader", &[("URL", &url)]), Child::spawn("leader", &[("URL", &url)])];
    let mut leader = 0;
    let mut samples = Vec::new();
    look::wait_until("one leads", BOUND, || {
        (0..2).any(|n| {
            let started =
                replicas[n].try_next().is_some_and(|(_, line)| line.starts_with("started"));
            leader = if started { n } else { leader };
            started
        })
    });
    for _ in 0..300 {
        std::thread::sleep(Duration::from_millis(40));
        replicas[leader].send("yield");
        let returned = stamp(&replicas[leader], "returned");
        leader = 1 - leader;
        let started = stamp(&replicas[leader], "started");
        samples.push(Duration::from_nanos(started.saturating_sub(returned)));
    }
    let ours = Samples::of(samples);
    let must = "median <= 10ms, p99 <= 50ms";
    table::times("hand-over, job to job", &ours, &bare_notify(&server, 300), must);
}

/// From `kill -9` of a holder to the job's start in a watching standby.
pub(crate) fn killed_holder() {
    const ROUNDS: usize = 200;
    let server = Server::start();
    let url = server.url();
    let mut samples = Vec::new();
    let spawn = || Child::spawn("leader", &[("URL", &url), ("WATCH", "1")]);
    let mut holder = spawn();
    stamp(&holder, "started");
    let mut eye = server.client();
    for _ in 0..ROUNDS {
        let standby = spawn();
        look::wait_until("it watches", BOUND, || {
            let sessions = look::sessions(&mut eye, "leasehold");
            sessions
                .iter()
                .any(|each| each.state == "active" && each.query.starts_with("/* leasehold watch"))
        });
        std::thread::sleep(Duration::from_millis(20));
        let killed = now();
        holder.kill9();
        samples.push(Duration::from_nanos(stamp(&standby, "started") - killed));
        holder = standby;
    }
    let ours = Samples::of(samples);

    // A waiter in the server's own queue. Its holder is a process too, as what dies has to be one.
    let mut bare = Vec::new();
    let key = leasehold::key("bench");
    for _ in 0..ROUNDS / 4 {
        stamp_or_started(&holder);
        let mut waiter = server.client();
        let pid: i32 = waiter.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
        let waiting = std::thread::spawn(move || {
            waiter.execute("SELECT pg_advisory_lock($1)", &[&key]).unwrap();
            now()
        });
        look::wait_until("it is queued", BOUND, || {
            look::advisory_locks(&mut eye).iter().any(|lock| lock.pid == pid && !lock.granted)
        });
        let killed = now();
        holder.kill9();
        bare.push(Duration::from_nanos(waiting.join().unwrap() - killed));
        holder = spawn();
        stamp(&holder, "started");
    }
    let must = "median <= 20ms, p99 <= 50ms";
    table::times("kill -9, watching standby", &ours, &Samples::of(bare), must);
}

/// The holder may have reported already.
fn stamp_or_started(holder: &Child) {
    while holder.try_next().is_some() {}
}

/// From `pg_terminate_backend` to the token.
pub(crate) fn killed_session() {
    const ROUNDS: usize = 200;
    let server = Server::start();
    let locker = Locker::new(server.config(), Options::new()).unwrap();
    let mut eye = server.client();
    let terminate = eye.prepare("SELECT pg_terminate_backend($1)").unwrap();
    let mut ours = Vec::new();
    for _ in 0..ROUNDS {
        let guard = locker.acquire_timeout("bench", BOUND).unwrap().unwrap();
        let pid = look::holder_pid(&mut eye, guard.key().as_i64()).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        let start = Instant::now();
        eye.execute(&terminate, &[&pid]).unwrap();
        assert!(guard.cancellation().wait_timeout(BOUND));
        ours.push(start.elapsed());
    }
    let mut bare = Vec::new();
    for _ in 0..ROUNDS {
        let mut client = server.client();
        let pid: i32 = client.query_one("SELECT pg_backend_pid()", &[]).unwrap().get(0);
        let parked = std::thread::spawn(move || {
            let ended = client.notifications().timeout_iter(BOUND).next();
            (Instant::now(), ended.is_err() || client.is_closed())
        });
        std::thread::sleep(Duration::from_millis(5));
        let start = Instant::now();
        eye.execute(&terminate, &[&pid]).unwrap();
        bare.push(parked.join().unwrap().0 - start);
    }
    table::times(
        "session killed, token set",
        &Samples::of(ours),
        &Samples::of(bare),
        "p99 <= 50ms",
    );
}
