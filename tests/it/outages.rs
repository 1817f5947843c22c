//! `run` contends until it is told to stop, through any outage, and goes on by itself.

use std::time::{Duration, Instant};

use leasehold::{CancellationToken, Error, Event, Lease, Locker, RunError};

use crate::support::leases::{NAME, PATIENCE, Recorder, fast, in_thread, locker};
use crate::support::{Server, look};

/// Leads until cancelled.
fn lead(lease: &Lease) -> Result<(), ()> {
    lease.cancellation().wait();
    Ok(())
}

fn acquired(event: &Event) -> bool {
    matches!(event, Event::Acquired { .. })
}

fn connect_failed(event: &Event) -> bool {
    matches!(event, Event::ConnectFailed { .. })
}

#[test]
fn a_server_that_is_away_at_the_start_is_waited_for() {
    let mut server = Server::start();
    server.stop_fast();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast()));
    let stop = CancellationToken::new();
    let runner = {
        let (locker, stop) = (locker.clone(), stop.clone());
        in_thread(move || locker.run(&stop, NAME, lead))
    };
    let (_, event) = recorder.wait_for_nth("three failures", 3, connect_failed);
    assert!(event.to_string().contains("refused"), "the cause is named: {event}");
    let outcome = locker.acquire_timeout("other", Duration::from_millis(500));
    assert!(matches!(outcome, Err(Error::Connect(_))), "an outage is no contention: {outcome:?}");
    server.start_again();
    let start = Instant::now();
    recorder.wait_for("a term", acquired);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    stop.cancel();
    assert!(runner.join().unwrap().is_ok());
}

#[test]
fn a_server_that_is_away_for_20_s_in_the_middle_costs_one_term_and_no_more() {
    let mut server = Server::start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast()));
    let stop = CancellationToken::new();
    let runner = {
        let (locker, stop) = (locker.clone(), stop.clone());
        in_thread(move || locker.run(&stop, NAME, lead))
    };
    recorder.wait_for("the first term", acquired);
    server.stop_immediate();
    recorder.wait_for("the loss", |event| matches!(event, Event::Lost { .. }));
    std::thread::sleep(Duration::from_secs(20));
    let attempts = recorder.count(connect_failed);
    // Backing off up to the retry interval: at most one attempt in 200 ms.
    assert!((20..=110).contains(&attempts), "{attempts} attempts in 20 s");
    server.start_again();
    let start = Instant::now();
    recorder.wait_for_nth("the second term", 2, acquired);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    stop.cancel();
    assert!(runner.join().unwrap().is_ok());
}

#[test]
fn every_kind_of_restart_is_survived_by_holder_and_standby() {
    let mut server = Server::start();
    let recorder = Recorder::new();
    let lockers =
        [locker(&server, recorder.attach(fast())), locker(&server, recorder.attach(fast()))];
    let stop = CancellationToken::new();
    let runners = lockers.clone().map(|locker| {
        let stop = stop.clone();
        in_thread(move || locker.run(&stop, NAME, lead))
    });
    recorder.wait_for("the first term", acquired);
    for round in 2..5 {
        match round {
            2 => server.stop_fast(),
            3 => server.stop_immediate(),
            _ => server.kill9(),
        }
        server.start_again();
        recorder.wait_for_nth("the next term", round, acquired);
        let locks = look::advisory_locks(&mut server.client());
        assert_eq!(locks.len(), 1, "{locks:?}");
    }
    stop.cancel();
    for runner in runners {
        assert!(runner.join().unwrap().is_ok());
    }
}

#[test]
fn a_hot_standby_is_refused_and_waited_out_until_its_promotion() {
    let primary = Server::start();
    let standby = primary.standby();
    let recorder = Recorder::new();
    let locker = locker(&standby, recorder.attach(fast()));
    for outcome in [locker.ping(), locker.try_acquire(NAME).map(drop)] {
        assert!(matches!(outcome, Err(Error::NotPrimary)), "{outcome:?}");
    }
    assert!(Error::NotPrimary.to_string().contains("target_session_attrs=read-write"));
    let stop = CancellationToken::new();
    let runner = {
        let (locker, stop) = (locker.clone(), stop.clone());
        in_thread(move || locker.run(&stop, NAME, lead))
    };
    recorder.wait_for("it is told", |event| {
        matches!(event, Event::ConnectFailed { error: Error::NotPrimary, .. })
    });
    standby.promote();
    let event = recorder.wait_for("a term", acquired);
    let Event::Acquired { token, .. } = event else { unreachable!() };
    assert_eq!(token.timeline(), 2);
    stop.cancel();
    assert!(runner.join().unwrap().is_ok());
}

#[test]
fn of_several_hosts_the_primary_is_found() {
    let primary = Server::start();
    let standby = primary.standby();
    let hosts = format!(
        "host=127.0.0.1,127.0.0.1 port={},{} user=postgres target_session_attrs=read-write",
        standby.port(),
        primary.port()
    );
    let locker = Locker::new(hosts.parse().unwrap(), fast()).unwrap();
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    assert!(look::holder_pid(&mut primary.client(), guard.key().as_i64()).is_some());
}

#[test]
fn a_server_that_refuses_us_is_an_event_that_names_the_cause_and_no_end() {
    let server = Server::builder()
        .hba("host all secret all scram-sha-256")
        .hba("host forbidden plain all trust")
        .start();
    server.execute("CREATE ROLE secret LOGIN PASSWORD 'right'");
    server.execute("CREATE ROLE plain LOGIN");
    server.execute("CREATE DATABASE forbidden");
    server.execute("REVOKE CONNECT ON DATABASE forbidden FROM PUBLIC");
    let base = format!("host=127.0.0.1 port={}", server.port());
    let cases = [
        (
            format!("{base} user=secret password=wrong dbname=postgres"),
            "password authentication failed",
        ),
        (format!("{base} user=postgres dbname=nowhere"), "\"nowhere\" does not exist"),
        (
            format!("{base} user=plain dbname=forbidden"),
            "permission denied for database \"forbidden\"",
        ),
        (format!("{base} user=nobody_such dbname=postgres"), "\"nobody_such\" does not exist"),
        ("host=no.such.host.invalid user=postgres".to_owned(), "lookup"),
    ];
    for (config, cause) in cases {
        let recorder = Recorder::new();
        let locker = Locker::new(config.parse().unwrap(), recorder.attach(fast())).unwrap();
        let stop = CancellationToken::new();
        let runner = {
            let (locker, stop) = (locker.clone(), stop.clone());
            in_thread(move || locker.run(&stop, NAME, lead))
        };
        let (_, event) = recorder.wait_for_nth(cause, 2, connect_failed);
        assert!(event.to_string().contains(cause), "{event}");
        let error = locker.ping().unwrap_err();
        assert!(error.chain().contains(cause), "{}", error.chain());
        assert!(error.is_retryable());
        stop.cancel();
        assert!(runner.join().unwrap().is_ok());
    }
    // The server is none the worse for it.
    assert!(locker(&server, fast()).try_acquire(NAME).unwrap().is_some());
}

#[test]
fn a_standby_that_loses_its_own_session_goes_on_with_a_new_one() {
    let server = Server::start();
    let recorder = Recorder::new();
    let holder = locker(&server, fast());
    let guard = holder.try_acquire(NAME).unwrap().unwrap();
    let waiting = locker(&server, recorder.attach(fast().application_name("waiting")));
    let stop = CancellationToken::new();
    let runner = {
        let (waiting, stop) = (waiting.clone(), stop.clone());
        in_thread(move || waiting.run(&stop, NAME, |_: &Lease| Err::<(), _>("leads")))
    };
    for _ in 0..5 {
        let mut pid = None;
        look::wait_until("a session", PATIENCE, || {
            pid =
                look::sessions(&mut server.client(), "waiting").first().map(|session| session.pid);
            pid.is_some()
        });
        server.client().execute("SELECT pg_terminate_backend($1)", &[&pid.unwrap()]).unwrap();
        look::wait_until("another session", Duration::from_secs(2), || {
            let sessions = look::sessions(&mut server.client(), "waiting");
            sessions.first().is_some_and(|session| Some(session.pid) != pid)
        });
    }
    guard.release().unwrap();
    assert!(matches!(runner.join().unwrap(), Err(RunError::Job("leads"))));
    drop(stop);
}
