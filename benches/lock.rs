//! Rates of locks against bare statements on bare clients.
//!
//! `cargo bench --bench lock -- URL [WORD]..`: words choose what is measured, by its title.
//!
//! Rates depend on the machine and its load, so both sides take turns, and ratios are compared.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench that cannot go on fails, and tells what it measured"
)]

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use leasehold::lock::{LockConfig, PooledLocker, ScopedLocker};
use leasehold::postgres::{Client, Config, NoTls};
use leasehold::{CancellationToken, Error};
use r2d2_postgres::PostgresConnectionManager;

const TTL: Duration = Duration::from_secs(60);
/// Of each side, in each round.
const SPAN: Duration = Duration::from_millis(700);
const ROUNDS: usize = 7;

/// Runs what `make` makes on each of `threads` threads for a span: operations per second.
fn rate<F: FnMut()>(threads: usize, make: impl Fn(usize) -> F + Sync) -> f64 {
    let ready = Barrier::new(threads);
    let each = |i: usize| {
        let mut operation = make(i);
        // What is done once for each client is not what is measured.
        (0..20).for_each(|_| operation());
        ready.wait();
        let (start, mut done) = (Instant::now(), 0_u32);
        while start.elapsed() < SPAN {
            operation();
            done += 1;
        }
        f64::from(done) / start.elapsed().as_secs_f64()
    };
    let each = &each;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|i| scope.spawn(move || each(i))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Both sides in turns; prints the medians and that of the ratios.
fn compare(what: &str, mut bare: impl FnMut() -> f64, mut ours: impl FnMut() -> f64) {
    let mut wanted = std::env::args().skip(1).filter(|arg| !arg.contains(['/', '-'])).peekable();
    if wanted.peek().is_some() && !wanted.all(|word| what.contains(&word)) {
        return;
    }
    let rounds: Vec<_> = (0..ROUNDS).map(|_| (bare(), ours())).collect();
    let ratio = median(rounds.iter().map(|(bare, ours)| ours / bare).collect());
    let bare = median(rounds.iter().map(|(bare, _)| *bare).collect());
    let ours = median(rounds.iter().map(|(_, ours)| *ours).collect());
    println!("{what:<46} bare {bare:>7.0}/s  ours {ours:>7.0}/s  ratio {ratio:.2}");
}

fn connect(config: &Config) -> Client {
    config.connect(NoTls).unwrap()
}

/// Lock and unlock with two prepared statements.
fn bare_session_lock(config: &Config, i: usize) -> impl FnMut() + use<> {
    let mut client = connect(config);
    let lock = client.prepare("SELECT pg_try_advisory_lock($1)").unwrap();
    let unlock = client.prepare("SELECT pg_advisory_unlock($1)").unwrap();
    let key = i64::try_from(i).unwrap();
    move || {
        assert!(client.query_one(&lock, &[&key]).unwrap().get::<_, bool>(0));
        assert!(client.query_one(&unlock, &[&key]).unwrap().get::<_, bool>(0));
    }
}

/// A transaction with one prepared statement in it.
fn bare_scoped_lock(config: &Config, i: usize) -> impl FnMut() + use<> {
    let mut client = connect(config);
    let lock = client.prepare("SELECT pg_advisory_xact_lock($1)").unwrap();
    let key = i64::try_from(i).unwrap();
    move || {
        let mut transaction = client.transaction().unwrap();
        transaction.query_one(&lock, &[&key]).unwrap();
        transaction.commit().unwrap();
    }
}

fn pooled(locker: &PooledLocker, i: usize) -> impl FnMut() + use<'_> {
    let key = format!("bench-{i}");
    move || locker.acquire(&key, TTL).unwrap().release().unwrap()
}

fn scoped(locker: &ScopedLocker, i: usize) -> impl FnMut() + use<'_> {
    let (key, never) = (format!("bench-{i}"), CancellationToken::new());
    move || locker.with_lock(&never, &key, || Ok::<_, Error>(())).unwrap()
}

fn main() {
    let url = std::env::args().find(|arg| arg.starts_with("postgres"));
    let config: Config = url.expect("a postgres:// URL").parse().unwrap();
    let options = LockConfig::new().pool_size(8);
    let own = PooledLocker::new(config.clone(), options.clone()).unwrap();
    let scope = ScopedLocker::new(config.clone(), options.clone()).unwrap();
    let manager = PostgresConnectionManager::new(config.clone(), NoTls);
    let pool = r2d2::Pool::builder().max_size(8).build(manager).unwrap();
    let users = PooledLocker::from_pool(pool, options).unwrap();
    for threads in [1, 8] {
        let title = |what: &str| format!("{what}, {threads} threads");
        let bare_session = || rate(threads, |i| bare_session_lock(&config, i));
        let bare_scope = || rate(threads, |i| bare_scoped_lock(&config, i));
        compare(&title("PooledLocker acquire + release"), bare_session, || {
            rate(threads, |i| pooled(&own, i))
        });
        compare(&title("ScopedLocker with_lock"), bare_scope, || {
            rate(threads, |i| scoped(&scope, i))
        });
        compare(&title("PooledLocker on a pool of the user's"), bare_session, || {
            rate(threads, |i| pooled(&users, i))
        });
    }
    let inside = || {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (mut operation, start, mut done) = (pooled(&own, 0), Instant::now(), 0_u32);
            while start.elapsed() < SPAN {
                operation();
                done += 1;
            }
            f64::from(done) / start.elapsed().as_secs_f64()
        })
    };
    compare(
        "PooledLocker inside a runtime (bare: outside)",
        || rate(1, |i| pooled(&own, i)),
        inside,
    );
}
