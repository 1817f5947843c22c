//! Each row of the table at `Locker::run`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::{
    CancelReason, CancellationToken, Error, Event, FencingToken, Lease, Locker, LostReason,
    RunError,
};

use crate::support::leases::{NAME, Recorder, fast, in_thread, locker};
use crate::support::{Server, look};

type NoError = std::convert::Infallible;

#[test]
fn a_cancelled_run_stops_the_job_then_releases_then_returns_ok() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let stop = CancellationToken::new();
    let key = leasehold::key(NAME);
    let held_at_the_end = Mutex::new(None);
    let outcome = locker.run(&stop, NAME, |lease: &Lease| -> Result<(), NoError> {
        stop.cancel();
        assert!(lease.wait_timeout(Duration::from_secs(5)));
        assert_eq!(lease.cancellation().reason(), Some(CancelReason::Cancelled));
        // Still at work, so still held: here and on the server.
        assert!(lease.is_held());
        *held_at_the_end.lock().unwrap() = look::holder_pid(&mut server.client(), key);
        Ok(())
    });
    assert!(outcome.is_ok());
    assert!(held_at_the_end.into_inner().unwrap().is_some());
    assert_eq!(look::holder_pid(&mut server.client(), key), None);
}

#[test]
fn an_error_of_the_job_is_returned_after_the_release() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let outcome = locker.run(&CancellationToken::new(), NAME, |_: &Lease| Err("no paper"));
    assert!(matches!(outcome, Err(RunError::Job("no paper"))));
    assert_eq!(look::holder_pid(&mut server.client(), leasehold::key(NAME)), None);
    assert!(locker.try_acquire(NAME).unwrap().is_some(), "the lease is free again");
}

#[test]
fn a_job_that_returns_ok_ends_the_run() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let calls = AtomicUsize::new(0);
    let outcome = locker.run(&CancellationToken::new(), NAME, |_: &Lease| -> Result<(), NoError> {
        calls.fetch_add(1, Ordering::SeqCst);
        Ok(())
    });
    assert!(outcome.is_ok());
    assert_eq!(calls.into_inner(), 1);
    assert_eq!(look::holder_pid(&mut server.client(), leasehold::key(NAME)), None);
}

#[test]
fn a_lost_lease_is_won_again_whatever_the_job_returned() {
    let server = Server::start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast()));
    let terms = Mutex::new(Vec::<FencingToken>::new());
    let outcome = locker.run(&CancellationToken::new(), NAME, |lease: &Lease| {
        let term = {
            let mut terms = terms.lock().unwrap();
            terms.push(lease.token());
            terms.len()
        };
        if term <= 2 {
            server.terminate(look::holder_pid(&mut server.client(), lease.key().as_i64()).unwrap());
            assert!(lease.wait_timeout(Duration::from_secs(5)), "the token is set");
            let reason = lease.cancellation().reason();
            assert_eq!(reason, Some(CancelReason::Lost(LostReason::SessionEnded)));
            assert!(!lease.is_held());
            assert!(matches!(lease.check(), Err(Error::Lost(LostReason::SessionEnded))));
        }
        match term {
            1 => Err("because of the loss"),
            2 => Ok(()),
            _ => Err("of the job's own"),
        }
    });
    assert!(matches!(outcome, Err(RunError::Job("of the job's own"))), "{outcome:?}");
    let terms = terms.into_inner().unwrap();
    assert!(terms.len() == 3 && terms.is_sorted_by(|a, b| a < b), "{terms:?}");
    let lost = recorder.count(|event| matches!(event, Event::Lost { .. }));
    assert_eq!(lost, 2, "one loss is one event");
}

#[test]
fn a_panic_of_the_job_releases_and_goes_on_in_the_callers_thread() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        locker.run(&CancellationToken::new(), NAME, |_: &Lease| -> Result<(), NoError> {
            std::panic::panic_any(42_i32)
        })
    }));
    assert_eq!(caught.unwrap_err().downcast_ref::<i32>(), Some(&42));
    assert_eq!(look::holder_pid(&mut server.client(), leasehold::key(NAME)), None);
    assert!(locker.try_acquire(NAME).unwrap().is_some());
}

#[test]
fn a_name_in_use_on_this_locker_is_refused_without_asking_the_database() {
    // Nobody listens there: a call that asked the database could not answer at once.
    let mut config = leasehold::postgres::Config::new();
    config.host("127.0.0.1").port(1).user("nobody");
    let recorder = Recorder::new();
    let locker = Locker::new(config, recorder.attach(fast())).unwrap();
    let stop = CancellationToken::new();
    let runner = {
        let (locker, stop) = (locker.clone(), stop.clone());
        in_thread(move || locker.run(&stop, NAME, |_: &Lease| -> Result<(), NoError> { Ok(()) }))
    };
    let refused = |locker: &Locker| {
        let start = Instant::now();
        let outcome = locker.run(&stop, NAME, |_: &Lease| -> Result<(), NoError> { Ok(()) });
        let took = start.elapsed();
        let already = matches!(outcome, Err(RunError::Lock(Error::AlreadyRunning)));
        (already, took)
    };
    recorder.wait_for("no database", |event| matches!(event, Event::ConnectFailed { .. }));
    let (already, took) = refused(&locker);
    assert!(already && took < Duration::from_millis(50), "{took:?}");
    stop.cancel();
    assert!(runner.join().unwrap().is_ok());
}

#[test]
fn run_returns_ok_when_the_locker_was_closed_before() {
    let server = Server::start();
    let locker = locker(&server, fast());
    locker.close();
    let outcome = locker.run(&CancellationToken::new(), NAME, |_: &Lease| -> Result<(), NoError> {
        panic!("the job of a closed locker was called")
    });
    assert!(outcome.is_ok());
}

#[test]
fn run_returns_ok_when_the_locker_is_closed_while_it_waits() {
    let server = Server::start();
    let holder = locker(&server, fast());
    let _held = holder.try_acquire(NAME).unwrap().unwrap();
    let recorder = Recorder::new();
    let standby = locker(&server, recorder.attach(fast()));
    let runner = {
        let standby = standby.clone();
        in_thread(move || {
            standby.run(&CancellationToken::new(), NAME, |_: &Lease| -> Result<(), NoError> {
                panic!("a job without a lease was called")
            })
        })
    };
    recorder.wait_for("waiting", |event| matches!(event, Event::Waiting { .. }));
    standby.close();
    assert!(runner.join().unwrap().is_ok());
}

#[test]
fn a_run_that_is_cancelled_while_it_waits_returns_ok_within_50_ms() {
    let server = Server::start();
    let holder = locker(&server, fast());
    let _held = holder.try_acquire(NAME).unwrap().unwrap();
    let recorder = Recorder::new();
    let standby = locker(&server, recorder.attach(fast()));
    let stop = CancellationToken::new();
    let runner = {
        let (standby, stop) = (standby.clone(), stop.clone());
        in_thread(move || {
            standby.run(&stop, NAME, |_: &Lease| -> Result<(), NoError> { Ok(()) }).unwrap();
            Instant::now()
        })
    };
    recorder.wait_for("waiting", |event| matches!(event, Event::Waiting { .. }));
    let cancelled = Instant::now();
    stop.cancel();
    assert!(runner.join().unwrap() - cancelled < Duration::from_millis(50));
}

#[test]
fn a_job_asked_to_step_down_releases_and_leaves_the_lease_to_another() {
    let server = Server::start();
    let (events, standby_events) = (Recorder::new(), Recorder::new());
    let stop = CancellationToken::new();
    let job = |lease: &Lease| -> Result<(), NoError> {
        while !lease.wait_timeout(Duration::from_secs(1)) {}
        Ok(())
    };
    let holder = locker(&server, events.attach(fast().allow_step_down(true)));
    let first = {
        let (holder, stop) = (holder.clone(), stop.clone());
        in_thread(move || holder.run(&stop, NAME, job))
    };
    events.wait_for("the first term", |event| matches!(event, Event::Acquired { .. }));
    let standby = locker(&server, standby_events.attach(fast()));
    let second = {
        let (standby, stop) = (standby.clone(), stop.clone());
        in_thread(move || standby.run(&stop, NAME, job))
    };
    standby_events.wait_for("waiting", |event| matches!(event, Event::Waiting { .. }));

    let elsewhere = locker(&server, fast());
    assert!(elsewhere.step_down(NAME).unwrap(), "the holder heard");
    let stopping = events.wait_for("the reason", |event| matches!(event, Event::Stopping { .. }));
    assert!(matches!(stopping, Event::Stopping { reason: CancelReason::StepDown, .. }));
    standby_events.wait_for("the next leader", |event| matches!(event, Event::Acquired { .. }));
    assert!(!elsewhere.step_down(NAME).unwrap(), "a holder that does not allow it says nothing");
    assert!(!elsewhere.step_down("nobody's").unwrap());

    // The first one contends again.
    look::wait_until("the first holder waits", Duration::from_secs(5), || {
        events.count(|event| matches!(event, Event::Waiting { .. })) > 0
    });
    stop.cancel();
    assert!(first.join().unwrap().is_ok() && second.join().unwrap().is_ok());
}
