//! What PostgreSQL 13 lacks, and what is told about it: its server cannot end an idle session.

use leasehold::Event;

use crate::support::leases::{NAME, Recorder, fast, locker};
use crate::support::{Server, ends_idle_sessions};

#[test]
fn a_bound_that_the_server_lacks_is_told_once_with_what_follows() {
    let server = Server::start();
    let recorder = Recorder::new();
    let locker = locker(&server, recorder.attach(fast()));
    let guard = locker.try_acquire(NAME).unwrap().unwrap();
    recorder.wait_for("a term", |event| matches!(event, Event::Acquired { .. }));
    let missing: Vec<String> = recorder
        .events()
        .iter()
        .filter(|event| matches!(event, Event::BoundMissing { .. }))
        .map(Event::to_string)
        .collect();
    if ends_idle_sessions() {
        assert_eq!(missing, Vec::<String>::new());
    } else {
        assert_eq!(
            missing,
            ["server has no setting idle_session_timeout: a stopped holder keeps its leases, a \
              vanished one until TCP keepalives end it"]
        );
    }
    guard.release().unwrap();
}
