//! Loom models: every interleaving of a few steps.

use super::*;
use loom::thread;

#[test]
fn one_of_two_reasons_wins_and_both_sides_agree() {
    loom::model(|| {
        let token = CancellationToken::new();
        let other = token.clone();
        let thread = thread::spawn(move || other.cancel_with(CancelReason::Closed));
        let mine = token.cancel();
        let theirs = thread.join().unwrap();
        assert!(mine ^ theirs);
        let winner = if mine { CancelReason::Cancelled } else { CancelReason::Closed };
        assert_eq!(token.reason(), Some(winner));
    });
}

#[test]
fn a_waiter_always_wakes() {
    loom::model(|| {
        let token = CancellationToken::new();
        let waiter = token.clone();
        let thread = thread::spawn(move || waiter.wait());
        token.cancel();
        thread.join().unwrap();
    });
}

#[test]
fn a_child_made_while_its_parent_is_set_is_set() {
    loom::model(|| {
        let parent = CancellationToken::new();
        let canceller = parent.clone();
        let thread = thread::spawn(move || canceller.cancel());
        let child = parent.child_token();
        thread.join().unwrap();
        assert!(child.is_cancelled());
    });
}

#[test]
fn a_listener_added_while_the_token_is_set_is_called() {
    loom::model(|| {
        let token = CancellationToken::new();
        let canceller = token.clone();
        let thread = thread::spawn(move || canceller.cancel());
        let heard = CancellationToken::new();
        let ear = heard.clone();
        let subscription = token.subscribe(move || {
            ear.cancel();
        });
        thread.join().unwrap();
        assert!(heard.is_cancelled());
        drop(subscription);
    });
}
