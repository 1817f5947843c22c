//! The contract of [`DistributedLocker`], rule by rule.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use super::{Contract, fresh_key, must, refused};
use crate::error::Error;
use crate::lock::{DistributedLock, DistributedLocker};

/// A TTL that does not pass while a check runs.
const LONG: Duration = Duration::from_secs(60);
/// How many racers there are.
const RACERS: usize = 8;

type Acquired = Box<dyn DistributedLock>;

/// Waits by asking again, for what happens on another thread or on the server.
#[track_caller]
fn eventually<T>(what: &str, within: Duration, mut ask: impl FnMut() -> Result<T, Error>) -> T {
    let end = Instant::now() + within;
    loop {
        match ask() {
            Ok(value) => return value,
            Err(Error::NotAcquired) if Instant::now() < end => {
                thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{what}: {} after {within:?}", error.chain()),
        }
    }
}

#[track_caller]
fn lapse(lock: &Acquired, short: Duration) {
    let end = Instant::now() + short * 4;
    while !lock.expired() {
        assert!(Instant::now() < end, "a TTL of {short:?} has not passed after four times that");
        thread::sleep(lock.remaining().min(short));
    }
    assert!(lock.remaining().is_zero(), "an expired lock has time remaining");
}

/// The handle tells the key and the TTL that were asked for, and time remains.
///
/// # Panics
///
/// If not.
pub fn handle_echoes_key_and_ttl(contract: &Contract<'_>) {
    let key = fresh_key("echo");
    let lock = must("acquire", contract.locker().acquire(&key, LONG));
    assert_eq!(lock.key(), key);
    assert_eq!(lock.ttl(), LONG);
    assert!(!lock.expired() && lock.remaining() <= LONG && !lock.remaining().is_zero());
}

/// An empty key is [`Error::EmptyName`], whatever the TTL.
///
/// # Panics
///
/// If not.
pub fn empty_key_is_refused(contract: &Contract<'_>) {
    let locker = contract.locker();
    refused("an empty key", locker.acquire("", LONG), &Error::EmptyName);
    refused("an empty key", locker.acquire("", Duration::ZERO), &Error::EmptyName);
}

/// A TTL of zero is [`Error::InvalidTtl`], and nothing is held.
///
/// # Panics
///
/// If not.
pub fn zero_ttl_is_refused(contract: &Contract<'_>) {
    let (locker, key) = (contract.locker(), fresh_key("zero"));
    refused("a TTL of zero", locker.acquire(&key, Duration::ZERO), &Error::InvalidTtl);
    drop(must("acquire after it", locker.acquire(&key, LONG)));
}

/// A refresh with zero is [`Error::InvalidTtl`]; the lock is held as before.
///
/// # Panics
///
/// If not.
pub fn refresh_with_zero_leaves_the_ttl(contract: &Contract<'_>) {
    let lock = must("acquire", contract.locker().acquire(&fresh_key("refresh0"), LONG));
    refused("a refresh with zero", lock.refresh(Duration::ZERO), &Error::InvalidTtl);
    assert_eq!(lock.ttl(), LONG);
    assert!(!lock.expired());
    must("release", lock.release());
}

/// A key that is held is [`Error::NotAcquired`], also on the locker that holds it.
///
/// # Panics
///
/// If not.
pub fn held_key_is_refused(contract: &Contract<'_>) {
    let (locker, key) = (contract.locker(), fresh_key("held"));
    let held = must("acquire", locker.acquire(&key, LONG));
    refused("a held key", locker.acquire(&key, LONG), &Error::NotAcquired);
    assert!(!held.expired());
    must("release", held.release());
}

/// Locks of different keys do not meet.
///
/// # Panics
///
/// If they do.
pub fn distinct_keys_are_independent(contract: &Contract<'_>) {
    let locker = contract.locker();
    let one = must("acquire", locker.acquire(&fresh_key("one"), LONG));
    let two = must("acquire another", locker.acquire(&fresh_key("two"), LONG));
    must("release", one.release());
    assert!(!two.expired());
    must("release the other", two.release());
}

/// A key that was released can be acquired again.
///
/// # Panics
///
/// If not.
pub fn released_key_is_reacquirable(contract: &Contract<'_>) {
    let (locker, key) = (contract.locker(), fresh_key("again"));
    for _ in 0..3 {
        let lock = must("acquire", locker.acquire(&key, LONG));
        must("release", lock.release());
    }
}

/// A key whose handle was dropped can be acquired again, soon.
///
/// # Panics
///
/// If not.
pub fn dropped_key_is_reacquirable(contract: &Contract<'_>) {
    let (locker, key) = (contract.locker(), fresh_key("drop"));
    drop(must("acquire", locker.acquire(&key, LONG)));
    drop(eventually("acquire after a drop", contract.grace, || locker.acquire(&key, LONG)));
}

/// Of eight who ask at once, one is granted, and the others hear [`Error::NotAcquired`].
///
/// # Panics
///
/// If not.
pub fn one_of_eight_racers_wins(contract: &Contract<'_>) {
    let key = fresh_key("race");
    let lockers: Vec<_> = (0..RACERS).map(|_| contract.locker()).collect();
    for locker in &lockers {
        must("ping", locker.ping());
    }
    let start = Barrier::new(RACERS);
    let race = |locker: &dyn DistributedLocker| {
        start.wait();
        match locker.acquire(&key, LONG) {
            Ok(lock) => Some(lock),
            Err(Error::NotAcquired) => None,
            Err(error) => panic!("a loser heard `{}`", error.chain()),
        }
    };
    let won: Vec<Option<Acquired>> = thread::scope(|scope| {
        let race = &race;
        let racers: Vec<_> = lockers.iter().map(|l| scope.spawn(move || race(&**l))).collect();
        racers.into_iter().filter_map(|racer| racer.join().ok()).collect()
    });
    assert_eq!(won.len(), RACERS, "a racer panicked");
    assert_eq!(won.iter().flatten().count(), 1, "winners among {RACERS}");
}

/// A lock keeps out other lockers as well, and is theirs to take once released.
///
/// # Panics
///
/// If not.
pub fn lock_is_seen_by_another_locker(contract: &Contract<'_>) {
    let (here, there, key) = (contract.locker(), contract.locker(), fresh_key("two-lockers"));
    let held = must("acquire", here.acquire(&key, LONG));
    refused("a key held by another locker", there.acquire(&key, LONG), &Error::NotAcquired);
    must("release", held.release());
    drop(must("acquire by the other", there.acquire(&key, LONG)));
}

/// A second release is [`Error::NotHeld`], and does not release the next holder's lock.
///
/// # Panics
///
/// If not.
pub fn second_release_is_not_held(contract: &Contract<'_>) {
    let (locker, key) = (contract.locker(), fresh_key("twice"));
    let lock = must("acquire", locker.acquire(&key, LONG));
    must("release", lock.release());
    assert!(lock.expired(), "a released lock is not expired");
    let next = must("acquire again", locker.acquire(&key, LONG));
    refused("a second release", lock.release(), &Error::NotHeld);
    drop(lock);
    must("release of the next holder", next.release());
}

/// A refresh after the release is [`Error::NotHeld`].
///
/// # Panics
///
/// If not.
pub fn refresh_after_release_is_not_held(contract: &Contract<'_>) {
    let lock = must("acquire", contract.locker().acquire(&fresh_key("late-refresh"), LONG));
    must("release", lock.release());
    refused("a refresh after the release", lock.refresh(LONG), &Error::NotHeld);
}

/// A lock that was refreshed is held beyond its first TTL.
///
/// # Panics
///
/// If not.
pub fn refresh_outlives_the_first_ttl(contract: &Contract<'_>) {
    let (here, there, key) = (contract.locker(), contract.locker(), fresh_key("outlive"));
    let lock = must("acquire", here.acquire(&key, contract.short));
    must("refresh", lock.refresh(LONG));
    assert_eq!(lock.ttl(), LONG);
    // What is waited for is that nothing happens.
    thread::sleep(contract.short * 2);
    assert!(!lock.expired());
    refused("a refreshed key", there.acquire(&key, LONG), &Error::NotAcquired);
    must("release", lock.release());
}

/// A release after the TTL has passed is [`Error::NotHeld`]; the key is free all the same.
///
/// # Panics
///
/// If not.
pub fn release_after_lapse_is_not_held(contract: &Contract<'_>) {
    let (locker, key) = (contract.locker(), fresh_key("lapse-release"));
    let lock = must("acquire", locker.acquire(&key, contract.short));
    lapse(&lock, contract.short);
    refused("a release after the lapse", lock.release(), &Error::NotHeld);
    drop(eventually("acquire after it", contract.grace, || locker.acquire(&key, LONG)));
}

/// A refresh after the TTL has passed is [`Error::NotHeld`], and revives nothing.
///
/// # Panics
///
/// If not.
pub fn refresh_after_lapse_is_not_held(contract: &Contract<'_>) {
    let lock =
        must("acquire", contract.locker().acquire(&fresh_key("lapse-refresh"), contract.short));
    lapse(&lock, contract.short);
    refused("a refresh after the lapse", lock.refresh(LONG), &Error::NotHeld);
    assert_eq!(lock.ttl(), contract.short);
    assert!(lock.expired());
}

/// A key whose holder let the TTL pass and does nothing is another's to take.
///
/// # Panics
///
/// If not.
pub fn lapsed_key_is_acquirable_by_others(contract: &Contract<'_>) {
    let (here, there, key) = (contract.locker(), contract.locker(), fresh_key("lapse"));
    let idle = must("acquire", here.acquire(&key, contract.short));
    lapse(&idle, contract.short);
    let next = eventually("a lapsed key", contract.grace, || there.acquire(&key, LONG));
    refused("a release of the former holder", idle.release(), &Error::NotHeld);
    must("release of the next", next.release());
}

/// A locker that can hand out locks answers a ping.
///
/// # Panics
///
/// If not.
pub fn ping_is_answered(contract: &Contract<'_>) {
    must("ping", contract.locker().ping());
}

/// A close releases what is out, and refuses from then on, also when it is called again.
///
/// # Panics
///
/// If not.
pub fn close_releases_and_refuses(contract: &Contract<'_>) {
    let (here, there, key) = (contract.locker(), contract.locker(), fresh_key("close"));
    let lock = must("acquire", here.acquire(&key, LONG));
    must("close", here.close());
    assert!(lock.expired(), "a lock outlives the close of its locker");
    refused("acquire after the close", here.acquire(&key, LONG), &Error::Closed);
    refused("ping after the close", here.ping(), &Error::Closed);
    drop(eventually("acquire by another locker", contract.grace, || there.acquire(&key, LONG)));
    must("a second close", here.close());
}
