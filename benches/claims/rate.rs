//! How many leases a second, against the same statements on bare clients.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use leasehold::postgres::{Client, Statement};
use leasehold::{Locker, Options};

use crate::statements::{TRY_LOCK, UNLOCK};
use crate::support::Server;
use crate::table;

const SLICE: Duration = Duration::from_millis(500);
const SLICES: usize = 10;

/// Runs `pairs` on `n` threads at a time for a slice; pairs per second.
fn rate(n: usize, pairs: &(dyn Fn(usize, &AtomicBool) -> usize + Sync)) -> f64 {
    let (stop, total) = (AtomicBool::new(false), AtomicUsize::new(0));
    let ready = Barrier::new(n + 1);
    let took = std::thread::scope(|scope| {
        for thread in 0..n {
            let (stop, total, ready) = (&stop, &total, &ready);
            scope.spawn(move || {
                ready.wait();
                total.fetch_add(pairs(thread, stop), Ordering::Relaxed);
            });
        }
        ready.wait();
        let start = Instant::now();
        std::thread::sleep(SLICE);
        stop.store(true, Ordering::Relaxed);
        start
    });
    total.into_inner() as f64 / took.elapsed().as_secs_f64()
}

/// A bare client and the library's two statements, prepared.
struct Bare {
    client: Client,
    lock: Statement,
    unlock: Statement,
}

impl Bare {
    fn on(server: &Server) -> Bare {
        let mut client = server.client();
        client.batch_execute("LISTEN leasehold").unwrap();
        let lock = client.prepare(TRY_LOCK.text).unwrap();
        let unlock = client.prepare(UNLOCK.text).unwrap();
        Bare { client, lock, unlock }
    }

    fn pair(&mut self, key: i64) {
        let none = None::<&str>;
        let (keys, fences) = (vec![key], vec![key + 1]);
        self.client.query(&self.lock, &[&keys, &fences, &none]).unwrap();
        self.client.query(&self.unlock, &[&keys, &none]).unwrap();
    }
}

/// How a lease is given back: by drop, which does not wait, or with the server's confirmation.
#[derive(Copy, Clone, PartialEq)]
enum GiveBack {
    Drop,
    Release,
}

fn compare(claim: &str, callers: usize, give_back: GiveBack, must: &str) {
    let server = Server::start();
    let locker = Locker::new(server.config(), Options::new()).unwrap();
    locker.ping().unwrap();
    let bare: Vec<_> = (0..callers).map(|_| std::sync::Mutex::new(Bare::on(&server))).collect();
    let ours = |thread: usize, stop: &AtomicBool| {
        let name = format!("bench-{thread}");
        let mut pairs = 0;
        while !stop.load(Ordering::Relaxed) {
            let guard = locker.try_acquire(&name).unwrap().unwrap();
            match give_back {
                GiveBack::Drop => drop(guard),
                GiveBack::Release => guard.release().unwrap(),
            }
            pairs += 1;
        }
        pairs
    };
    let yardstick = |thread: usize, stop: &AtomicBool| {
        let mut bare = bare[thread].lock().unwrap();
        let mut pairs = 0;
        while !stop.load(Ordering::Relaxed) {
            bare.pair(1_000 + 2 * i64::try_from(thread).unwrap());
            pairs += 1;
        }
        pairs
    };
    let slices: Vec<(f64, f64)> =
        (0..SLICES).map(|_| (rate(callers, &ours), rate(callers, &yardstick))).collect();
    table::rates(claim, &slices, must);
}

pub(crate) fn one_caller() {
    compare("acquire + release, 1 caller", 1, GiveBack::Drop, ">= 0.85");
    compare("the same, release confirmed", 1, GiveBack::Release, "");
}

pub(crate) fn eight_callers() {
    compare("acquire + release, 8 callers", 8, GiveBack::Drop, ">= 0.5");
    compare("the same, release confirmed", 8, GiveBack::Release, "");
}

/// The library's statements against the same without the token: a bare lock and unlock.
pub(crate) fn price_of_the_token() {
    let server = Server::start();
    let mut bare = Bare::on(&server);
    let mut plain = server.client();
    let lock = plain.prepare("SELECT pg_try_advisory_lock($1)").unwrap();
    let unlock = plain.prepare("SELECT pg_advisory_unlock($1)").unwrap();
    let measure = |pair: &mut dyn FnMut()| {
        let (start, mut pairs) = (Instant::now(), 0);
        while start.elapsed() < SLICE {
            pair();
            pairs += 1;
        }
        f64::from(pairs) / start.elapsed().as_secs_f64()
    };
    let slices: Vec<(f64, f64)> = (0..SLICES)
        .map(|_| {
            let with = measure(&mut || bare.pair(1));
            let without = measure(&mut || {
                plain.query(&lock, &[&3_i64]).unwrap();
                plain.query(&unlock, &[&3_i64]).unwrap();
            });
            (with, without)
        })
        .collect();
    table::rates("token, fence and notify, bare", &slices, "(price)");
}
