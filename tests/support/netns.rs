//! A second host on this machine: a network namespace with a wire to ours.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command;

/// The other host. Needs root, and fails with what to install where something is missing.
pub struct Net {
    name: String,
    wire: String,
    server: Ipv4Addr,
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .output()
        .map_err(|error| {
            format!("cannot run {program}: {error}; install it (Debian: iproute2, iptables), and run as root")
        })?;
    let text = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(()).ok_or(format!("{program} {arguments:?}: {text}"))
}

impl Net {
    pub fn new() -> Net {
        let id = fastrand::u16(1..u16::MAX);
        let [high, low] = id.to_be_bytes();
        let net = Net {
            name: format!("leasehold-{id}"),
            wire: format!("lease{id}"),
            server: Ipv4Addr::new(10, high, low, 1),
        };
        let inside = format!("in{id}");
        let (name, wire) = (net.name.as_str(), net.wire.as_str());
        let address = |last: u8| format!("10.{high}.{low}.{last}/24");
        let steps: [&[&str]; 7] = [
            &["netns", "add", name],
            &["link", "add", wire, "type", "veth", "peer", "name", &inside, "netns", name],
            &["addr", "add", &address(1), "dev", wire],
            &["link", "set", wire, "up"],
            &["-n", name, "addr", "add", &address(2), "dev", &inside],
            &["-n", name, "link", "set", &inside, "up"],
            &["-n", name, "link", "set", "lo", "up"],
        ];
        for step in steps {
            run("ip", step).unwrap();
        }
        net
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Our side's address: what a server has to listen on.
    pub fn server(&self) -> IpAddr {
        self.server.into()
    }

    /// Gives the other host a name server that never answers, for as long as the value lives.
    pub fn resolver_that_is_silent(&self) -> Resolver {
        let folder = PathBuf::from("/etc/netns").join(&self.name);
        std::fs::create_dir_all(&folder).unwrap();
        let [a, b, c, _] = self.server.octets();
        std::fs::write(folder.join("resolv.conf"), format!("nameserver {a}.{b}.{c}.9\n")).unwrap();
        Resolver(folder)
    }

    fn iptables(&self, arguments: &[&str]) {
        let mut all = vec!["netns", "exec", &self.name, "iptables", "-w"];
        all.extend(arguments);
        run("ip", &all).unwrap();
    }

    /// Every packet of the other host is lost, both ways: no FIN, no RST, no error.
    pub fn cut(&self) {
        self.iptables(&["-A", "INPUT", "-j", "DROP"]);
        self.iptables(&["-A", "OUTPUT", "-j", "DROP"]);
    }

    /// Nothing reaches the other host any more; what it sends arrives.
    pub fn cut_inbound(&self) {
        self.iptables(&["-A", "INPUT", "-j", "DROP"]);
    }

    /// Nothing of what the other host sends arrives any more.
    pub fn cut_outbound(&self) {
        self.iptables(&["-A", "OUTPUT", "-j", "DROP"]);
    }

    /// The wire is unplugged on our side.
    pub fn unplug(&self) {
        run("ip", &["link", "set", &self.wire, "down"]).unwrap();
    }

    /// A part of the packets is lost, both ways.
    pub fn lose(&self, part: f64) {
        let part = part.to_string();
        for chain in ["INPUT", "OUTPUT"] {
            let random = ["-m", "statistic", "--mode", "random", "--probability", &part];
            let mut rule = vec!["-A", chain];
            rule.extend(random);
            rule.extend(["-j", "DROP"]);
            self.iptables(&rule);
        }
    }

    /// The wire is whole again.
    pub fn heal(&self) {
        self.iptables(&["-F"]);
        run("ip", &["link", "set", &self.wire, "up"]).unwrap();
    }
}

/// The other host's own configuration of name resolution.
pub struct Resolver(PathBuf);

impl Drop for Resolver {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            assert!(std::thread::panicking(), "{error}");
        }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // The wire goes with the namespace.
        if let Err(error) = run("ip", &["netns", "del", &self.name]) {
            assert!(std::thread::panicking(), "{error}");
        }
    }
}
