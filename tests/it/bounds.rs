//! No call outlives its bound: on a frozen server, on a black hole, during name resolution.

use std::time::{Duration, Instant};

use leasehold::{CancellationToken, Error, Lease, Locker};

use crate::support::leases::{NAME, PATIENCE, fast, in_thread, locker};
use crate::support::{Child, Net, Server, ends_idle_sessions, look};

/// The query time-out of [`fast`], and what scheduling on a busy machine adds.
const BOUND: Duration = Duration::from_millis(1000 + 250);

/// Every call that asks the server, on one that does not answer.
fn every_call_ends(locker: &Locker, why: &str) {
    type Call<'a> = &'a dyn Fn() -> Result<(), Error>;
    let calls: [(&str, Call<'_>); 5] = [
        ("ping", &|| locker.ping()),
        ("try_acquire", &|| locker.try_acquire("other").map(drop)),
        ("acquire_timeout", &|| {
            locker.acquire_timeout("other", Duration::from_millis(700)).map(drop)
        }),
        ("holder", &|| locker.holder(NAME).map(drop)),
        ("step_down", &|| locker.step_down(NAME).map(drop)),
    ];
    for (name, call) in calls {
        let start = Instant::now();
        let outcome = call();
        let took = start.elapsed();
        assert!(took < BOUND, "{name} took {took:?} on {why}");
        assert!(outcome.is_err(), "{name} on {why}: {outcome:?}");
    }
}

#[test]
fn on_a_frozen_server_every_call_ends_in_its_bound_with_a_session_and_without() {
    let server = Server::start();
    let (with, without) = (locker(&server, fast()), locker(&server, fast()));
    let guard = with.try_acquire(NAME).unwrap().unwrap();
    server.freeze();
    every_call_ends(&with, "a frozen server");
    every_call_ends(&without, "a frozen postmaster");
    let start = Instant::now();
    assert!(guard.release().is_err());
    assert!(start.elapsed() < BOUND, "release took {:?}", start.elapsed());
    // A run that is cancelled while it cannot even connect.
    let stop = CancellationToken::new();
    let runner = {
        let (without, stop) = (without.clone(), stop.clone());
        in_thread(move || without.run(&stop, "run", |_: &Lease| Ok::<_, ()>(())))
    };
    let start = Instant::now();
    stop.cancel();
    assert!(runner.join().unwrap().is_ok());
    assert!(start.elapsed() < Duration::from_millis(100));
    let start = Instant::now();
    without.close();
    assert!(start.elapsed() < 2 * BOUND, "close took {:?}", start.elapsed());
    server.thaw();
    look::wait_until("nothing is left", PATIENCE, || {
        look::advisory_locks(&mut server.client()).is_empty()
    });
    with.ping().unwrap();
}

#[test]
fn on_a_black_hole_every_call_ends_in_its_bound() {
    let net = Net::new();
    net.cut();
    let mut config = leasehold::postgres::Config::new();
    // An address of the other host, which drops everything.
    let std::net::IpAddr::V4(ours) = net.server() else { unreachable!() };
    let [a, b, c, _] = ours.octets();
    config.host(&format!("{a}.{b}.{c}.2")).user("postgres");
    let locker = Locker::new(config, fast()).unwrap();
    every_call_ends(&locker, "a black hole");
    let start = Instant::now();
    locker.close();
    assert!(start.elapsed() < 2 * BOUND, "close took {:?}", start.elapsed());
}

#[test]
fn during_name_resolution_every_call_ends_in_its_bound() {
    let net = Net::new();
    // The other host asks a name server that does not answer.
    let _resolver = net.resolver_that_is_silent();
    let mut child = Child::spawn_in(
        net.name(),
        "caller",
        &[("URL", "postgres://postgres@db.example/postgres"), ("Q", "1000")],
    );
    child.expect("ready", PATIENCE);
    for call in ["ping", "try_acquire", "acquire_timeout", "holder", "step_down"] {
        child.send(call);
        let (_, answer) = child.expect("took", PATIENCE);
        let took: u64 = answer.split(' ').next().unwrap().parse().unwrap();
        assert!(u128::from(took) < BOUND.as_millis(), "{call}: {answer}");
        assert!(answer.contains("Err("), "{call}: {answer}");
    }
    child.send("close");
    let (_, answer) = child.expect("took", PATIENCE);
    let took: u64 = answer.split(' ').next().unwrap().parse().unwrap();
    assert!(u128::from(took) < 2 * BOUND.as_millis(), "close: {answer}");
}

#[test]
fn the_owner_thread_is_free_within_100_ms_of_the_deadline() {
    let server = Server::start();
    let locker = locker(&server, fast());
    locker.ping().unwrap();
    server.freeze();
    let start = Instant::now();
    assert!(matches!(locker.ping(), Err(Error::Timeout(_))));
    let first = start.elapsed();
    server.thaw();
    // The next call is served by the same thread, over a new session.
    let start = Instant::now();
    locker.ping().unwrap();
    assert!(start.elapsed() < Duration::from_millis(300), "{:?} after {first:?}", start.elapsed());
}

#[test]
fn over_a_unix_socket_leases_work_and_losses_are_seen() {
    let server = Server::start();
    let mut config = leasehold::postgres::Config::new();
    config.host_path(server.socket_folder()).port(server.port()).user("postgres");
    let locker = Locker::new(config.clone(), fast()).unwrap();
    let rival = Locker::new(config, fast()).unwrap();
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    assert!(rival.try_acquire(NAME).unwrap().is_none());
    let waiter = {
        let rival = rival.clone();
        in_thread(move || rival.acquire_timeout(NAME, PATIENCE).unwrap().unwrap().release())
    };
    look::wait_until("it waits", PATIENCE, || {
        look::sessions(&mut server.client(), "leasehold").len() == 2
    });
    guard.release().unwrap();
    waiter.join().unwrap().unwrap();

    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    let pid = look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap();
    let client = &mut server.client();
    let start = Instant::now();
    client.execute("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
    assert!(guard.cancellation().wait_timeout(PATIENCE));
    assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
    drop(guard);

    // The owner thread may be stuck now; the clock is not, and neither are calls.
    let guard = locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
    let pid = look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap();
    let start = Instant::now();
    server.freeze_backend(pid);
    assert!(guard.cancellation().wait_timeout(PATIENCE));
    assert!(start.elapsed() < Duration::from_millis(1200 + 250), "{:?}", start.elapsed());
    every_call_ends(&locker, "a frozen backend behind a Unix socket");
    let start = Instant::now();
    locker.close();
    assert!(start.elapsed() < 2 * BOUND, "close took {:?}", start.elapsed());
    server.thaw_backend(pid);
}

#[test]
fn limits_of_the_server_neither_end_a_lease_nor_are_exceeded_silently() {
    use crate::support::leases::Recorder;
    use leasehold::Event;
    let mut server = Server::builder();
    if ends_idle_sessions() {
        server = server.conf("idle_session_timeout", "300ms");
    }
    let server = server
        .conf("statement_timeout", "100ms")
        .conf("lock_timeout", "50ms")
        .conf("idle_in_transaction_session_timeout", "200ms")
        .conf("default_transaction_isolation", "serializable")
        .conf("default_transaction_read_only", "on")
        .conf("synchronous_commit", "off")
        .start();
    let recorder = Recorder::new();
    let (a, b) = (
        locker(&server, recorder.attach(fast().heartbeat_interval(Duration::from_secs(1)))),
        locker(&server, fast().retry_interval(Duration::from_secs(1))),
    );
    let guard = a.try_acquire(NAME).unwrap().unwrap();
    let waiter = {
        let b = b.clone();
        in_thread(move || b.acquire_timeout(NAME, PATIENCE).unwrap().unwrap().release())
    };
    std::thread::sleep(Duration::from_secs(3));
    assert!(guard.is_held());
    assert_eq!(recorder.count(|event| matches!(event, Event::SessionLost { .. })), 0);
    let replaced: Vec<String> = recorder
        .events()
        .into_iter()
        .filter_map(|event| match event {
            Event::LimitReplaced { setting, .. } => Some(setting),
            _ => None,
        })
        .collect();
    let told = replaced.iter().any(|setting| setting == "idle_session_timeout");
    assert_eq!(told, ends_idle_sessions(), "{replaced:?}");
    for limit in ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"] {
        assert!(replaced.iter().any(|setting| setting == limit), "{limit}: {replaced:?}");
    }
    guard.release().unwrap();
    waiter.join().unwrap().unwrap();
}
