//! A lost session is noticed, once, by every job on it, and nothing of it touches the next one.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use leasehold::{CancelReason, CancellationToken, Error, Event, Lease, LostReason, RunError};

use crate::support::leases::{NAME, PATIENCE, Recorder, fast, locker};
use crate::support::{Server, look};

/// P2, asserted with room for a loaded machine.
const P2: Duration = Duration::from_millis(50);

#[test]
fn a_terminated_session_is_seen_by_every_lease_on_it_within_50_ms() {
    let server = Server::start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast()));
    let mut took = Vec::new();
    for round in 0..40 {
        let names = ["a", "b", "c"];
        let guards = names.map(|name| locker.try_acquire(name).unwrap().unwrap());
        let pid = look::holder_pid(&mut server.client(), guards[0].key().as_i64()).unwrap();
        let client = &mut server.client();
        let start = Instant::now();
        client.execute("SELECT pg_terminate_backend($1)", &[&pid]).unwrap();
        for guard in &guards {
            assert!(guard.cancellation().wait_timeout(PATIENCE));
            assert!(!guard.is_held());
            assert!(matches!(guard.check(), Err(Error::Lost(LostReason::SessionEnded))));
        }
        took.push(start.elapsed());
        let lost = |event: &Event| matches!(event, Event::Lost { .. });
        recorder.wait_for_nth("each loss is told", 3 * (round + 1), lost);
        assert_eq!(recorder.count(lost), 3 * (round + 1), "once");
    }
    took.sort();
    assert!(took[took.len() * 95 / 100] < P2, "{took:?}");
}

#[test]
fn the_work_after_a_loss_is_waited_for_and_reported_every_second() {
    let server = Server::start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast()));
    let stop = CancellationToken::new();
    let returned = Mutex::new(None);
    let outcome = locker.run(&stop, NAME, |lease: &Lease| -> Result<(), RunError<()>> {
        server.terminate(look::holder_pid(&mut server.client(), lease.key().as_i64()).unwrap());
        // Deaf to its token, until two reports were made.
        recorder.wait_for_nth("two reports", 2, |event| matches!(event, Event::Overrun { .. }));
        stop.cancel();
        *returned.lock().unwrap() = Some(Instant::now());
        Ok(())
    });
    assert!(outcome.is_ok());
    assert!(returned.into_inner().unwrap().is_some(), "run waited for the job");
    let overruns: Vec<Duration> = recorder
        .events()
        .iter()
        .filter_map(|event| match event {
            Event::Overrun { since, .. } => Some(*since),
            _ => None,
        })
        .collect();
    let gap = overruns[1] - overruns[0];
    assert!(gap >= Duration::from_millis(900) && gap < Duration::from_secs(2), "{overruns:?}");
}

#[test]
fn a_guard_of_an_earlier_session_touches_nothing_of_the_present_one() {
    let server = Server::start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast()));
    let old = locker.try_acquire("old").unwrap().unwrap();
    server.terminate(look::holder_pid(&mut server.client(), old.key().as_i64()).unwrap());
    assert!(old.cancellation().wait_timeout(PATIENCE));
    // The name is in use until the guard is gone, though lost.
    assert!(matches!(locker.try_acquire("old"), Err(Error::AlreadyRunning)));
    let other = locker.try_acquire("other").unwrap().unwrap();
    assert!(matches!(old.release(), Err(Error::Lost(LostReason::SessionEnded))));
    let again = locker.try_acquire("old").unwrap().unwrap();
    assert!(other.is_held() && again.is_held());
    let keys = [other.key().as_i64(), again.key().as_i64()];
    for key in keys {
        assert!(look::holder_pid(&mut server.client(), key).is_some());
    }
    assert_eq!(recorder.count(|event| matches!(event, Event::Released { .. })), 0);
}

#[test]
fn two_lockers_of_one_process_never_both_lead() {
    let server = Server::start();
    let (a, b) = (locker(&server, fast()), locker(&server, fast()));
    let leading = Mutex::new(0_i32);
    let stop = CancellationToken::new();
    let rounds = Mutex::new(0);
    std::thread::scope(|scope| {
        for locker in [&a, &b] {
            scope.spawn(|| {
                let job = |lease: &Lease| -> Result<(), ()> {
                    let now = {
                        let mut leading = leading.lock().unwrap();
                        *leading += 1;
                        *leading
                    };
                    assert_eq!(now, 1, "two leaders");
                    assert!(!lease.wait_timeout(Duration::from_millis(1)) || stop.is_cancelled());
                    *leading.lock().unwrap() -= 1;
                    let mut rounds = rounds.lock().unwrap();
                    *rounds += 1;
                    if *rounds == 200 {
                        stop.cancel();
                    }
                    Ok(())
                };
                while !stop.is_cancelled() {
                    locker.run(&stop, NAME, job).unwrap();
                }
            });
        }
    });
    assert!(rounds.into_inner().unwrap() >= 200);
}

#[test]
fn a_late_answer_within_the_query_time_out_keeps_the_term() {
    let server = Server::start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast()));
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    let pid = look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap();
    server.freeze_backend(pid);
    // Half of the query time-out has gone by when this is told.
    let late = recorder.wait_for("late", |event| matches!(event, Event::Late { .. }));
    server.thaw_backend(pid);
    assert!(matches!(late, Event::Late { used, .. } if (0.4..0.8).contains(&used)), "{late}");
    look::wait_until("a heartbeat is answered", PATIENCE, || {
        guard.remaining() > Duration::from_millis(950)
    });
    assert!(guard.is_held());
    assert_eq!(recorder.count(|event| matches!(event, Event::SessionLost { .. })), 0);
    guard.release().unwrap();
}

#[test]
fn a_frozen_backend_is_lost_by_the_clock_and_by_nothing_else() {
    let server = Server::start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast()));
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    let pid = look::holder_pid(&mut server.client(), guard.key().as_i64()).unwrap();
    // The deadline counts from the start of the last good answer: what is left now is the most.
    let most = guard.remaining();
    let start = Instant::now();
    server.freeze_backend(pid);
    assert!(guard.cancellation().wait_timeout(PATIENCE));
    let took = start.elapsed();
    assert!(!guard.is_held());
    let least = Duration::from_millis(800);
    let bound = most.max(Duration::from_millis(1200)) + Duration::from_millis(100);
    assert!(took > least && took < bound, "{took:?}");
    assert!(matches!(guard.check(), Err(Error::Lost(LostReason::NoAnswer))));
    server.thaw_backend(pid);
    drop(guard);
    look::wait_until("it can be had again", PATIENCE, || {
        locker.try_acquire(NAME).is_ok_and(|lease| lease.is_some())
    });
}

#[test]
fn heartbeats_go_on_until_a_cancelled_job_has_returned() {
    let server = Server::start();
    let locker = locker(&server, fast());
    let stop = CancellationToken::new();
    locker
        .run(&stop, NAME, |lease: &Lease| -> Result<(), ()> {
            stop.cancel();
            assert!(lease.cancellation().is_cancelled());
            // Longer than heartbeat interval and query time-out together.
            let end = Instant::now() + Duration::from_millis(1800);
            while Instant::now() < end {
                assert!(lease.is_held());
                std::thread::sleep(Duration::from_millis(10));
            }
            assert_eq!(lease.cancellation().reason(), Some(CancelReason::Cancelled));
            Ok(())
        })
        .unwrap();
    assert_eq!(look::holder_pid(&mut server.client(), leasehold::key(NAME)), None);
}
