use super::*;
use std::sync::atomic::AtomicUsize;
use std::thread;

#[test]
fn every_reason_survives_its_code() {
    let lost = LostReason::ALL.map(CancelReason::Lost);
    let plain = [CancelReason::Cancelled, CancelReason::Closed, CancelReason::StepDown];
    for reason in plain.into_iter().chain(lost) {
        assert_eq!(CancelReason::from_code(reason.code()), Some(reason));
    }
}

#[test]
fn the_first_reason_wins() {
    let token = CancellationToken::new();
    assert!(token.cancel_with(CancelReason::StepDown));
    assert!(!token.cancel());
    assert_eq!(token.reason(), Some(CancelReason::StepDown));
}

#[test]
fn children_follow_their_parent_and_not_the_other_way_round() {
    let parent = CancellationToken::new();
    let (a, b) = (parent.child_token(), parent.child_token());
    let grandchild = a.child_token();
    b.cancel_with(CancelReason::Closed);
    assert!(!parent.is_cancelled() && !a.is_cancelled());
    parent.cancel();
    assert_eq!(grandchild.reason(), Some(CancelReason::Cancelled));
    assert_eq!(b.reason(), Some(CancelReason::Closed));
    assert_eq!(parent.child_token().reason(), Some(CancelReason::Cancelled));
}

#[test]
fn a_deep_chain_of_children_does_not_overflow_the_stack() {
    let root = CancellationToken::new();
    let mut chain = vec![root.clone()];
    for _ in 0..200_000 {
        chain.push(chain[chain.len() - 1].child_token());
    }
    root.cancel();
    assert!(chain[chain.len() - 1].is_cancelled());
}

#[test]
fn dead_children_are_swept() {
    let parent = CancellationToken::new();
    for _ in 0..10_000 {
        drop(parent.child_token());
    }
    assert!(parent.node.lock().children.len() <= 16);
}

#[test]
fn a_wait_ends_when_the_token_is_set() {
    let token = CancellationToken::new();
    let waiter = token.clone();
    let thread = thread::spawn(move || waiter.wait_timeout(Duration::from_secs(60)));
    token.cancel();
    assert!(thread.join().unwrap());
}

#[test]
fn a_wait_is_honoured_from_zero_to_for_ever() {
    let token = CancellationToken::new();
    assert!(!token.wait_timeout(Duration::ZERO));
    let start = Instant::now();
    assert!(!token.wait_timeout(Duration::from_millis(50)));
    assert!(start.elapsed() >= Duration::from_millis(50));
    assert!(!token.wait_deadline(start));
    token.cancel();
    assert!(token.wait_timeout(Duration::MAX));
}

#[test]
fn a_drop_guard_sets_its_token_unless_disarmed() {
    let token = CancellationToken::new();
    assert!(!token.drop_guard().disarm().is_cancelled());
    drop(token.drop_guard());
    assert!(token.is_cancelled());
}

#[test]
fn a_listener_is_called_once_or_never() {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = || {
        let calls = Arc::clone(&calls);
        move || {
            calls.fetch_add(1, Ordering::SeqCst);
        }
    };
    let token = CancellationToken::new();
    let _kept = token.subscribe(count());
    drop(token.subscribe(count()));
    token.cancel();
    token.cancel();
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    let _late = token.subscribe(count());
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}
