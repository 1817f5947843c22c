//! PgBouncer: refused where it cannot hold a lock, as good as the server where it can.

use std::time::Duration;

use leasehold::{CancellationToken, Error, Event, Lease, Locker, RunError};

use crate::support::leases::{NAME, PATIENCE, Recorder, fast, in_thread};
use crate::support::{PgBouncer, Server, look};

/// 25 attempts on a quiet pool and 25 on a busy one: each is refused.
fn is_refused(mode: &str) {
    let server = Server::builder().conf("max_connections", "100").start();
    let pooler = PgBouncer::start(&server, mode, &[]);
    let refused = |round: usize| {
        let locker = Locker::new(pooler.config(), fast()).unwrap();
        let outcome = match round % 3 {
            0 => locker.ping(),
            1 => locker.try_acquire(NAME).map(drop),
            _ => match locker.run(&CancellationToken::new(), NAME, |_: &Lease| Ok::<_, ()>(())) {
                Err(RunError::Lock(error)) => Err(error),
                other => panic!("round {round}: {other:?}"),
            },
        };
        assert!(matches!(outcome, Err(Error::TransactionPooling)), "round {round}: {outcome:?}");
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("pool_mode = session"), "{text}");
    };
    (0..25).for_each(refused);
    let stop = CancellationToken::new();
    let clients: Vec<_> = (0..20)
        .map(|_| {
            let (mut config, stop) = (pooler.config(), stop.clone());
            config.application_name("busy");
            in_thread(move || {
                let mut client = config.connect(leasehold::postgres::NoTls).unwrap();
                while !stop.is_cancelled() {
                    client.simple_query("SELECT pg_sleep(0.001)").unwrap();
                }
            })
        })
        .collect();
    (0..25).for_each(refused);
    stop.cancel();
    clients.into_iter().for_each(|client| client.join().unwrap());
    // Nothing of the probing is set or held in the pool's server sessions that lasts.
    let mut eye = server.client();
    let leases = look::advisory_locks(&mut eye);
    assert!(leases.iter().all(|lock| lock.key != leasehold::key(NAME)), "{leases:?}");
}

#[test]
fn transaction_mode_is_refused_50_of_50() {
    is_refused("transaction");
}

#[test]
fn statement_mode_is_refused_50_of_50() {
    is_refused("statement");
}

#[test]
fn a_refused_pool_is_left_as_it_was() {
    let server = Server::start();
    let pooler = PgBouncer::start(&server, "transaction", &[("default_pool_size", "1")]);
    let locker = Locker::new(pooler.config(), fast()).unwrap();
    // With one server connection the second probe cannot even be opened while the first is at work.
    assert!(locker.ping().is_err());
    locker.close();
    let mut client = pooler.config().connect(leasehold::postgres::NoTls).unwrap();
    for setting in ["statement_timeout", "idle_session_timeout", "search_path"] {
        let changed: bool = client
            .query_typed(
                "SELECT setting IS DISTINCT FROM reset_val FROM pg_settings WHERE name = $1",
                &[(&setting, leasehold::postgres::types::Type::TEXT)],
            )
            .unwrap()[0]
            .get(0);
        assert!(!changed, "{setting} was changed in a session that is others'");
    }
}

#[test]
fn session_mode_carries_leases_hand_overs_and_losses() {
    let server = Server::start();
    let mut pooler = PgBouncer::start(&server, "session", &[]);
    let events = [Recorder::new(), Recorder::new()];
    let lockers = [&events[0], &events[1]]
        .map(|recorder| Locker::new(pooler.config(), recorder.attach(fast())).unwrap());
    for locker in &lockers {
        locker.ping().unwrap();
    }
    for round in 0..20 {
        let guard = lockers[round % 2].try_acquire(NAME).unwrap().unwrap();
        assert!(lockers[(round + 1) % 2].try_acquire(NAME).unwrap().is_none());
        guard.release().unwrap();
    }
    let guard = lockers[0].try_acquire(NAME).unwrap().unwrap();
    let waiter = {
        let locker = lockers[1].clone();
        in_thread(move || locker.acquire_timeout(NAME, PATIENCE).unwrap().unwrap().release())
    };
    events[1].wait_for("waiting", |event| matches!(event, Event::Waiting { .. }));
    guard.release().unwrap();
    waiter.join().unwrap().unwrap();
    // The pooler dies, and with it every session.
    let guard = lockers[0].try_acquire(NAME).unwrap().unwrap();
    let start = std::time::Instant::now();
    pooler.kill9();
    assert!(guard.cancellation().wait_timeout(PATIENCE));
    assert!(start.elapsed() < Duration::from_millis(100), "{:?}", start.elapsed());
    drop(guard);
    pooler.start_again();
    let guard = lockers[1].acquire_timeout(NAME, PATIENCE).unwrap().unwrap();
    let waiting = lockers[0].clone();
    assert!(waiting.try_acquire(NAME).is_ok_and(|lease| lease.is_none()));
    guard.release().unwrap();
}
