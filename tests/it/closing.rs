//! `close`, `close_timeout` and drops: jobs return first, everything is released, nothing lingers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use leasehold::{CancelReason, CancellationToken, Error, Event, Lease, Timeout};

use crate::support::leases::{NAME, PATIENCE, Recorder, fast, in_thread, locker};
use crate::support::{Server, look};

#[test]
fn close_tells_jobs_waits_for_them_releases_and_ends_the_session() {
    let server = Server::start();
    let locker = locker(&server, fast().application_name("closing"));
    let (started, begun) = crossbeam_channel::bounded(1);
    let returned = std::sync::Arc::new(AtomicBool::new(false));
    let runner = {
        let (locker, returned) = (locker.clone(), std::sync::Arc::clone(&returned));
        in_thread(move || {
            locker.run(&CancellationToken::new(), NAME, |lease: &Lease| -> Result<(), ()> {
                started.send(()).unwrap();
                lease.cancellation().wait();
                assert_eq!(lease.cancellation().reason(), Some(CancelReason::Closed));
                // Winding down takes longer than a lease that gets no heartbeats lasts.
                std::thread::sleep(Duration::from_millis(1500));
                assert!(lease.is_held());
                returned.store(true, Ordering::SeqCst);
                Ok(())
            })
        })
    };
    begun.recv().unwrap();
    let guard = locker.try_acquire("guarded").unwrap().unwrap();
    locker.close();
    assert!(returned.load(Ordering::SeqCst), "close waited");
    assert!(runner.join().unwrap().is_ok());
    assert_eq!(guard.cancellation().reason(), Some(CancelReason::Closed));
    assert!(!guard.is_held() && matches!(guard.check(), Err(Error::NotHeld)));
    assert!(look::advisory_locks(&mut server.client()).is_empty());
    look::wait_until("the session is gone", PATIENCE, || {
        look::sessions(&mut server.client(), "closing").is_empty()
    });
    for outcome in
        [locker.try_acquire(NAME).map(drop), locker.ping(), locker.holder(NAME).map(drop)]
    {
        assert!(matches!(outcome, Err(Error::Closed)));
    }
    locker.close();
    assert!(matches!(guard.release(), Err(Error::NotHeld)));
}

#[test]
fn close_timeout_names_the_jobs_that_have_not_returned_and_keeps_their_leases() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let (started, begun) = crossbeam_channel::bounded(1);
    let (go, gone) = crossbeam_channel::bounded::<()>(0);
    let runner = {
        let locker = locker.clone();
        in_thread(move || {
            locker.run(&CancellationToken::new(), "stubborn", |lease: &Lease| -> Result<(), ()> {
                started.send(()).unwrap();
                assert!(gone.recv().is_err());
                assert!(lease.is_held());
                Ok(())
            })
        })
    };
    begun.recv().unwrap();
    let start = Instant::now();
    let error = locker.close_timeout(Duration::from_millis(1500)).unwrap_err();
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(1500) && took < Duration::from_millis(1600), "{took:?}");
    let Error::Timeout(Timeout::Close(_, jobs)) = &error else { panic!("{error:?}") };
    assert_eq!(**jobs, ["stubborn".to_owned()]);
    assert!(error.to_string().contains("stubborn"), "{error}");
    let key = leasehold::key("stubborn");
    assert!(look::holder_pid(&mut server.client(), key).is_some());
    drop(go);
    locker.close_timeout(PATIENCE).unwrap();
    assert!(runner.join().unwrap().is_ok());
    assert_eq!(look::holder_pid(&mut server.client(), key), None);
}

#[test]
fn a_job_may_close_its_own_locker() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let inner = locker.clone();
    let outcome = locker.run(&CancellationToken::new(), NAME, |lease: &Lease| -> Result<(), ()> {
        inner.close();
        assert_eq!(lease.cancellation().reason(), Some(CancelReason::Closed));
        assert!(lease.is_held(), "still at work");
        Ok(())
    });
    assert!(outcome.is_ok());
    assert!(look::advisory_locks(&mut server.client()).is_empty());
    locker.close();
}

#[test]
fn jobs_may_close_their_locker_while_they_wait_for_each_other() {
    let server = Server::start();
    let locker = locker(&server, fast().application_name("nested"));
    let (told, ended) = crossbeam_channel::bounded(1);
    let runner = {
        let locker = locker.clone();
        in_thread(move || {
            let outcome = locker.run(&CancellationToken::new(), "outer", |_: &Lease| {
                // The outer job waits for the inner one, which closes; then it closes itself.
                let inner = locker.run(&CancellationToken::new(), "inner", |lease: &Lease| {
                    locker.close();
                    assert_eq!(lease.cancellation().reason(), Some(CancelReason::Closed));
                    Ok::<_, ()>(())
                });
                locker.close_timeout(Duration::ZERO).unwrap();
                inner
            });
            told.send(()).unwrap();
            outcome
        })
    };
    ended.recv_timeout(PATIENCE).expect("the jobs wait for each other");
    assert!(runner.join().unwrap().is_ok());
    // Nobody else closes: the last job's return did.
    look::wait_until("the session is gone", PATIENCE, || {
        look::sessions(&mut server.client(), "nested").is_empty()
    });
    locker.close();
}

#[test]
fn close_does_not_wait_for_a_run_that_only_waits_while_the_session_is_stuck() {
    let server = Server::start();
    // Over a Unix socket nothing bounds a statement that is not answered.
    let mut config = leasehold::postgres::Config::new();
    config.host_path(server.socket_folder()).port(server.port());
    config.user("postgres").dbname("postgres");
    let holder = self::locker(&server, fast());
    let _guard = holder.try_acquire(NAME).unwrap().unwrap();
    let events = Recorder::new();
    let waiting = leasehold::Locker::new(config, events.attach(fast())).unwrap();
    let runner = {
        let waiting = waiting.clone();
        in_thread(move || {
            waiting.run(&CancellationToken::new(), NAME, |_: &Lease| Err::<(), _>("not ours"))
        })
    };
    events.wait_for("waiting", |event| matches!(event, Event::Waiting { .. }));
    server.freeze();
    // Long enough for the next try, which is not answered.
    std::thread::sleep(Duration::from_millis(400));
    let start = Instant::now();
    let closer = in_thread(move || waiting.close());
    look::wait_until("run returns", Duration::from_millis(500), || runner.is_finished());
    look::wait_until("closed", PATIENCE, || closer.is_finished());
    // Twice the query time-out of 1 s.
    assert!(start.elapsed() < Duration::from_millis(2200), "{:?}", start.elapsed());
    assert!(runner.join().unwrap().is_ok());
    server.thaw();
}

#[test]
fn an_event_listener_may_close_the_locker() {
    let server = Server::start();
    let handle = std::sync::Arc::new(std::sync::OnceLock::<leasehold::Locker>::new());
    let closed = std::sync::Arc::new(AtomicBool::new(false));
    let options = {
        let (handle, closed) = (std::sync::Arc::clone(&handle), std::sync::Arc::clone(&closed));
        fast().on_event(move |event| {
            if let (Event::Acquired { .. }, Some(locker)) = (event, handle.get()) {
                locker.close();
                closed.store(true, Ordering::SeqCst);
            }
        })
    };
    let locker = handle.get_or_init(|| self::locker(&server, options));
    let _guard = locker.try_acquire(NAME).unwrap().unwrap();
    look::wait_until("closed", PATIENCE, || closed.load(Ordering::SeqCst));
    assert!(matches!(locker.ping(), Err(Error::Closed)));
}

#[test]
fn dropping_the_last_locker_returns_at_once_and_its_guards_live_on() {
    let server = Server::start();
    let locker = locker(&server, fast().application_name("dropped"));
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    let start = Instant::now();
    drop(locker);
    assert!(start.elapsed() < Duration::from_millis(50));
    // Longer than a lease without heartbeats.
    std::thread::sleep(Duration::from_millis(1400));
    assert!(guard.is_held());
    drop(guard);
    look::wait_until("lease and session are gone", PATIENCE, || {
        look::sessions(&mut server.client(), "dropped").is_empty()
    });
    assert!(look::advisory_locks(&mut server.client()).is_empty());
}

#[test]
fn dropping_and_closing_on_a_frozen_server_keep_their_bounds() {
    let server = Server::start();
    let (a, b) = (locker(&server, fast()), locker(&server, fast()));
    let guards = [a.try_acquire("a").unwrap().unwrap(), b.try_acquire("b").unwrap().unwrap()];
    server.freeze();
    let start = Instant::now();
    drop(a);
    assert!(start.elapsed() < Duration::from_millis(50), "a drop does not block");
    let start = Instant::now();
    b.close();
    // Twice the query time-out of 1 s.
    assert!(start.elapsed() < Duration::from_millis(2200), "{:?}", start.elapsed());
    let start = Instant::now();
    drop(guards);
    assert!(start.elapsed() < Duration::from_millis(50), "a drop does not block");
    server.thaw();
    look::wait_until("nothing is left", PATIENCE, || {
        look::advisory_locks(&mut server.client()).is_empty()
    });
}
