//! Statements whose outcome is unknown: an error, silence or a reset, at each statement in turn.

use std::time::Duration;

use leasehold::{Error, Event, LostReason};

use crate::support::leases::{NAME, PATIENCE, Recorder, fast};
use crate::support::proxy::Fault;
use crate::support::{Proxy, Server, look};

/// Every statement that a session of leases sends, in the order of its life.
const STATEMENTS: [&str; 12] = [
    "hello",
    "pin",
    "pid",
    "probe_lock",
    "probe_scoped",
    "probe_unlock",
    "settings",
    "beacon",
    "listen",
    "try_lock",
    "heartbeat",
    "unlock",
];

/// After one fault anywhere: the lease can be had, given back, and nothing is left on the server.
fn one_fault_at_each_statement(fault: Fault) {
    let server = Server::start();
    for statement in STATEMENTS {
        let proxy = Proxy::to(&server);
        let recorder = Recorder::new();
        let options = recorder.attach(fast().application_name("struck"));
        let locker = leasehold::Locker::new(proxy.config(), options).unwrap();
        proxy.strike(statement, 1, fault);
        let first = locker.try_acquire(NAME);
        if let Ok(Some(guard)) = &first {
            // The heartbeat and the unlock are yet to come.
            look::wait_until("a heartbeat", PATIENCE, || {
                guard.remaining() < Duration::from_millis(1050)
            });
            look::wait_until("its answer, or the loss", PATIENCE, || {
                guard.remaining() > Duration::from_millis(1100) || !guard.is_held()
            });
        }
        let outcome = first.map(|guard| guard.map(|guard| guard.release()));
        assert_eq!(proxy.struck(), 1, "{statement} was not reached");
        // Whatever the first caller heard, no lock is left, and the next one succeeds.
        let mut eye = server.client();
        look::wait_until(
            &format!("no lock is left after {statement}: {outcome:?}"),
            PATIENCE,
            || look::advisory_locks(&mut eye).is_empty(),
        );
        let second = locker.acquire_timeout(NAME, PATIENCE);
        let guard = second.unwrap_or_else(|error| panic!("after {statement}: {error:?}")).unwrap();
        assert!(guard.is_held());
        guard.release().unwrap();
        assert!(look::advisory_locks(&mut eye).is_empty());
        locker.close();
        look::wait_until(&format!("no session is left after {statement}"), PATIENCE, || {
            look::sessions(&mut eye, "struck").is_empty()
        });
    }
}

#[test]
fn an_error_at_each_statement_ends_in_a_proven_state() {
    one_fault_at_each_statement(Fault::Error);
}

#[test]
fn silence_at_each_statement_ends_in_a_proven_state() {
    one_fault_at_each_statement(Fault::Silence);
}

#[test]
fn a_reset_at_each_statement_ends_in_a_proven_state() {
    one_fault_at_each_statement(Fault::Reset);
}

#[test]
fn a_heartbeat_that_was_answered_with_an_error_is_asked_again_within_the_deadline() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let recorder = Recorder::new();
    let locker = leasehold::Locker::new(proxy.config(), recorder.attach(fast())).unwrap();
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    proxy.strike("heartbeat", 2, Fault::Error);
    look::wait_until("both errors", PATIENCE, || proxy.struck() == 2);
    look::wait_until("a good answer", PATIENCE, || guard.remaining() > Duration::from_millis(1100));
    assert!(guard.is_held());
    assert_eq!(recorder.count(|event| matches!(event, Event::SessionLost { .. })), 0);
    // And neither is it silent success: errors for good are a loss, by the clock.
    proxy.strike("heartbeat", usize::MAX, Fault::Error);
    assert!(guard.cancellation().wait_timeout(PATIENCE));
    assert!(matches!(guard.check(), Err(Error::Lost(LostReason::NoAnswer))));
}

#[test]
fn a_grant_whose_answer_was_an_error_is_given_back_on_the_same_session() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let recorder = Recorder::new();
    let locker = leasehold::Locker::new(proxy.config(), recorder.attach(fast())).unwrap();
    let other = locker.try_acquire("other").unwrap().unwrap();
    proxy.strike("try_lock", 1, Fault::Error);
    let outcome = locker.try_acquire(NAME);
    assert!(matches!(outcome, Err(Error::Query { statement: "try_lock", .. })), "{outcome:?}");
    let locks = look::advisory_locks(&mut server.client());
    assert_eq!(locks.len(), 1, "the grant was found and given back: {locks:?}");
    assert!(other.is_held(), "and the session is as good as before");
}

#[test]
fn an_unlock_that_says_false_is_an_event_and_ends_the_session() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let recorder = Recorder::new();
    let locker = leasehold::Locker::new(proxy.config(), recorder.attach(fast())).unwrap();
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    let other = locker.try_acquire("other").unwrap().unwrap();
    proxy.strike("unlock", 1, Fault::Flip);
    assert!(matches!(guard.release(), Err(Error::NotHeld)));
    recorder
        .wait_for("the event", |event| matches!(event, Event::ReleaseFailed { error: None, .. }));
    assert!(other.cancellation().wait_timeout(PATIENCE));
    assert!(matches!(other.check(), Err(Error::Lost(LostReason::InDoubt))));
    drop(other);
    look::wait_until("the session is closed", PATIENCE, || {
        look::advisory_locks(&mut server.client()).is_empty()
    });
    assert!(locker.try_acquire(NAME).unwrap().is_some());
}

#[test]
fn a_lock_that_vanished_from_its_session_is_found_by_the_next_heartbeat() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let recorder = Recorder::new();
    // A heartbeat interval in which the injected statement finds the session idle.
    let options = fast().heartbeat_interval(Duration::from_millis(600));
    let locker = leasehold::Locker::new(proxy.config(), recorder.attach(options)).unwrap();
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    // What a pooler in session mode runs when it takes the session for a new client's.
    proxy.inject("SELECT pg_advisory_unlock_all()");
    assert!(guard.cancellation().wait_timeout(PATIENCE));
    assert!(matches!(guard.check(), Err(Error::Lost(LostReason::NotOwner))));
}

#[test]
fn a_server_that_became_a_standby_ends_the_term_at_the_next_heartbeat() {
    let server = Server::start();
    let proxy = Proxy::to(&server);
    let locker = leasehold::Locker::new(proxy.config(), fast()).unwrap();
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    proxy.strike("heartbeat", 1, Fault::Flip);
    assert!(guard.cancellation().wait_timeout(PATIENCE));
    assert!(matches!(guard.check(), Err(Error::Lost(LostReason::Demoted))));
}

#[test]
fn an_endpoint_whose_lock_functions_do_nothing_is_refused() {
    let server = Server::start();
    for statement in ["probe_scoped", "probe_unlock"] {
        let proxy = Proxy::to(&server);
        let locker = leasehold::Locker::new(proxy.config(), fast()).unwrap();
        proxy.strike(statement, usize::MAX, Fault::Flip);
        assert!(matches!(locker.ping(), Err(Error::TransactionPooling)), "{statement}");
        let outcome = locker.try_acquire(NAME);
        assert!(matches!(outcome, Err(Error::TransactionPooling)), "{outcome:?}");
    }
}

#[test]
fn lock_functions_of_the_same_name_on_the_search_path_are_not_called() {
    let server = Server::start();
    server.execute(
        "CREATE SCHEMA stub;
         CREATE FUNCTION stub.pg_try_advisory_lock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true';
         CREATE FUNCTION stub.pg_advisory_unlock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true';
         CREATE FUNCTION stub.pg_try_advisory_xact_lock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true';
         ALTER ROLE postgres SET search_path = stub, pg_catalog",
    );
    let stubbed: bool = server
        .client()
        .query_one("SELECT pg_try_advisory_lock(1) AND pg_try_advisory_lock(1)", &[])
        .unwrap()
        .get(0);
    assert!(stubbed && look::advisory_locks(&mut server.client()).is_empty(), "the stub is called");
    let lockers = [0, 1].map(|_| leasehold::Locker::new(server.config(), fast()).unwrap());
    let guard = lockers[0].try_acquire(NAME).unwrap().unwrap();
    assert!(lockers[1].try_acquire(NAME).unwrap().is_none(), "a lock all the same");
    guard.release().unwrap();
    assert!(lockers[1].try_acquire(NAME).unwrap().is_some());
}
