//! Thousands of leases on one session, and what happens when the server has no room.

use std::time::{Duration, Instant};

use leasehold::{CancellationToken, Error, Event, Lease};

use crate::support::leases::{NAME, PATIENCE, Recorder, fast, locker};
use crate::support::{Server, look};

#[test]
fn five_thousand_leases_are_held_by_one_session_while_five_thousand_wait_on_another() {
    const N: usize = 5_000;
    // A default configuration, but for the disk, which is not what is asked about.
    let server = Server::builder().conf("fsync", "off").start();
    let slow =
        || fast().query_timeout(Duration::from_secs(10)).heartbeat_interval(Duration::from_secs(1));
    let holder = locker(&server, slow().application_name("holding"));
    let names: Vec<String> = (0..N).map(|n| format!("tenant-{n}")).collect();
    let guards: Vec<_> =
        names.iter().map(|name| holder.try_acquire(name).unwrap().unwrap()).collect();
    let recorder = Recorder::new();
    let waiting = locker(&server, recorder.attach(slow().application_name("waiting")));
    let stop = CancellationToken::new();
    std::thread::scope(|scope| {
        for name in &names {
            let (waiting, stop) = (&waiting, &stop);
            std::thread::Builder::new()
                .stack_size(128 << 10)
                .spawn_scoped(scope, move || {
                    let job = |lease: &Lease| -> Result<(), ()> {
                        lease.cancellation().wait();
                        Ok(())
                    };
                    waiting.run(stop, name, job).unwrap();
                })
                .unwrap();
        }
        recorder.wait_for_nth("all wait", N, |event| matches!(event, Event::Waiting { .. }));
        let mut eye = server.client();
        for application in ["holding", "waiting"] {
            assert_eq!(look::sessions(&mut eye, application).len(), 1, "{application}");
        }
        // The heartbeat is one statement, and takes milliseconds.
        let start = Instant::now();
        holder.ping().unwrap();
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        std::thread::sleep(Duration::from_secs(3));
        assert!(guards.iter().all(|guard| guard.is_held()));
        // What is released is taken over at once, one or many.
        drop(guards);
        recorder.wait_for_nth("all lead", N, |event| matches!(event, Event::Acquired { .. }));
        assert_eq!(look::advisory_locks(&mut eye).len(), N);
        stop.cancel();
    });
    look::wait_until("nothing is left", PATIENCE, || {
        look::advisory_locks(&mut server.client()).is_empty()
    });
}

#[test]
fn a_full_lock_table_is_named_leaves_the_session_good_and_is_not_spun_on() {
    let server = Server::builder()
        .conf("max_locks_per_transaction", "10")
        .conf("max_connections", "20")
        .conf("log_statement", "all")
        .start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast().application_name("filling")));
    let mut guards = Vec::new();
    let error = loop {
        match locker.try_acquire(&format!("n{}", guards.len())) {
            Ok(guard) => guards.push(guard.unwrap()),
            Err(error) => break error,
        }
        assert!(guards.len() < 10_000, "the lock table does not fill");
    };
    assert!(matches!(error, Error::LockTableFull), "{error:?}");
    assert!(error.to_string().contains("max_locks_per_transaction") && error.is_retryable());
    assert!(guards.iter().all(|guard| guard.is_held()), "the session is good");
    assert_eq!(recorder.count(|event| matches!(event, Event::SessionLost { .. })), 0);

    // A standing wish goes on, at its own pace.
    let stop = CancellationToken::new();
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| {
            locker.run(&stop, NAME, |lease: &Lease| -> Result<(), ()> {
                lease.cancellation().wait();
                Ok(())
            })
        });
        let full =
            |event: &Event| matches!(event, Event::TryFailed { error: Error::LockTableFull });
        recorder.wait_for_nth("it is told", 2, full);
        let log = server.log_during(|| std::thread::sleep(Duration::from_secs(2)));
        let tries = log.lines().filter(|line| line.contains("/* leasehold try_lock")).count();
        assert!((5..=25).contains(&tries), "{tries} tries in 2 s at one per 200 ms, and its error");
        let before = recorder.count(|event| matches!(event, Event::Acquired { .. }));
        // Room for the lock, its fence and what a statement needs.
        guards.truncate(guards.len() - 40);
        let acquired = |event: &Event| matches!(event, Event::Acquired { .. });
        recorder.wait_for_nth("room is used", before + 1, acquired);
        stop.cancel();
        runner.join().unwrap().unwrap();
    });
    assert!(guards.iter().all(|guard| guard.is_held()));
}

#[test]
fn a_batch_that_does_not_fit_gets_what_fits() {
    let server = Server::builder()
        .conf("max_locks_per_transaction", "10")
        .conf("max_connections", "20")
        .start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast().query_timeout(Duration::from_secs(5))));
    locker.ping().unwrap();
    let stop = CancellationToken::new();
    std::thread::scope(|scope| {
        for n in 0..1_500 {
            let (locker, stop) = (&locker, &stop);
            std::thread::Builder::new()
                .stack_size(128 << 10)
                .spawn_scoped(scope, move || {
                    let job = |lease: &Lease| -> Result<(), ()> {
                        lease.cancellation().wait();
                        Ok(())
                    };
                    locker.run(stop, &format!("n{n}"), job).unwrap();
                })
                .unwrap();
        }
        let acquired = |event: &Event| matches!(event, Event::Acquired { .. });
        recorder.wait_for_nth("some get theirs", 200, acquired);
        recorder.wait_for("some do not", |event| {
            matches!(event, Event::TryFailed { error: Error::LockTableFull })
        });
        assert_eq!(recorder.count(|event| matches!(event, Event::SessionLost { .. })), 0);
        stop.cancel();
    });
    // While the table is full, others cannot even connect.
    locker.close();
    look::wait_until("nothing is left", PATIENCE, || {
        let eye = server.config().connect(leasehold::postgres::NoTls);
        eye.is_ok_and(|mut eye| look::advisory_locks(&mut eye).is_empty())
    });
}
