//! What a holder and a standby cost while nothing happens.

use std::time::{Duration, Instant};

use leasehold::{CancellationToken, Lease, LeaseGuard, Locker, Options};

use crate::support::{Server, look};

const SPAN: Duration = Duration::from_secs(15);

struct Usage {
    cpu: Duration,
    switches: u64,
    threads: usize,
    memory: u64,
}

/// What the library's own threads have used so far.
fn usage() -> Usage {
    let mut usage = Usage { cpu: Duration::ZERO, switches: 0, threads: 0, memory: 0 };
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        if !read("comm").starts_with("leasehold-") {
            continue;
        }
        usage.threads += 1;
        // Nanoseconds on a processor.
        let nanos = read("schedstat").split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        usage.cpu += Duration::from_nanos(nanos);
        let switches = read("status");
        let line = switches.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
        usage.switches +=
            line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0);
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    usage.memory = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    usage
}

fn row(what: &str, server: &Server, before_all: &Usage) {
    let before = usage();
    let start = Instant::now();
    let log = server.log_during(|| std::thread::sleep(SPAN));
    let span = start.elapsed().as_secs_f64();
    let after = usage();
    let statements = log.lines().filter(|line| line.contains("/* leasehold ")).count() as f64;
    println!(
        "{what:<34}{:>8.2} statements/s{:>8.3} % of a core{:>7.1} wake-ups/s{:>4} threads{:>8} KiB",
        statements / span,
        (after.cpu - before.cpu).as_secs_f64() / span * 100.0,
        (after.switches - before.switches) as f64 / span,
        after.threads,
        after.memory.saturating_sub(before_all.memory),
    );
}

pub(crate) fn cost() {
    for n in [1, 1000] {
        let server = Server::builder().conf("log_statement", "all").start();
        let before = usage();
        let holder = Locker::new(server.config(), Options::new()).unwrap();
        let guards: Vec<LeaseGuard> =
            (0..n).map(|n| holder.try_acquire(&format!("bench-{n}")).unwrap().unwrap()).collect();
        row(&format!("idle holder of {n}"), &server, &before);

        let elsewhere = Locker::new(server.config(), Options::new()).unwrap();
        drop(guards);
        holder.close();
        look::wait_until("released", SPAN, || {
            look::advisory_locks(&mut server.client()).is_empty()
        });
        // Held by a bare client, so that the threads counted are the standby's.
        let mut bare = server.client();
        for n in 0..n {
            let key = leasehold::key(&format!("bench-{n}"));
            bare.execute("SELECT pg_advisory_lock($1)", &[&key]).unwrap();
        }
        let stop = CancellationToken::new();
        std::thread::scope(|scope| {
            for n in 0..n {
                let (elsewhere, stop) = (&elsewhere, &stop);
                let body = move || {
                    elsewhere
                        .run(stop, &format!("bench-{n}"), |_: &Lease| Ok::<_, ()>(()))
                        .unwrap();
                };
                let builder = std::thread::Builder::new().stack_size(128 << 10);
                builder.spawn_scoped(scope, body).unwrap();
            }
            std::thread::sleep(Duration::from_secs(1));
            row(&format!("idle standby of {n}"), &server, &before);
            stop.cancel();
        });
    }
}
