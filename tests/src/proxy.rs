//! A proxy between initiator and target that breaks connections: at any byte, with a reset, in order, or by letting
//! nothing through in one direction any more.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::thread::{self, JoinHandle};

use crate::Random;

/// Bytes passed on at a time.
const PIECE: usize = 64 << 10;

/// How a connection is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kill {
    /// Both ends are reset; what is under way is lost.
    Reset,
    /// Both ends are closed in order, in the middle of whatever was being said.
    Close,
    /// Nothing gets to the initiator any more; the connection stands.
    Deafen,
    /// Nothing gets to the target any more; the connection stands.
    Silence,
}

/// A direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToTarget,
    ToInitiator,
}

/// When a connection is broken: after so many bytes of one direction.
#[derive(Clone, Copy, Debug)]
struct Fate {
    way: Way,
    after: u64,
    kill: Kill,
}

impl Fate {
    fn draw(random: &mut Random, longest: u64, stalls: bool) -> Self {
        let way = if random.below(2) == 0 { Way::ToTarget } else { Way::ToInitiator };
        // Some break during the handshake, most in the middle of payloads.
        let longest = if random.below(8) == 0 { 2_000 } else { longest };
        let kill = match random.below(if stalls { 20 } else { 19 }) {
            0..10 => Kill::Reset,
            10..19 => Kill::Close,
            _ if way == Way::ToTarget => Kill::Silence,
            _ => Kill::Deafen,
        };
        Self { way, after: 1 + random.below(longest), kill }
    }
}

/// What new connections are to suffer.
#[derive(Debug)]
struct Danger {
    random: Random,
    longest: u64,
    stalls: bool,
}

/// The proxy. Its connections are closed when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    to: SocketAddr,
    danger: Mutex<Option<Danger>>,
    links: Mutex<Vec<Weak<Link>>>,
    kills: AtomicU64,
    opened: AtomicU64,
    stop: AtomicBool,
}

/// One connection through the proxy.
#[derive(Debug)]
struct Link {
    initiator: TcpStream,
    target: TcpStream,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    over: bool,
    /// Directions that let nothing through: to the target, to the initiator.
    stalled: [bool; 2],
}

impl Proxy {
    /// A proxy to this address, which lets everything through.
    ///
    /// # Panics
    /// When there is no free port.
    #[must_use]
    pub fn start(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            to,
            danger: Mutex::default(),
            links: Mutex::default(),
            kills: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let there = shared.clone();
        let acceptor = thread::spawn(move || {
            for stream in listener.incoming() {
                if there.stop.load(Ordering::SeqCst) {
                    return;
                }
                // The target may be gone: then so is the connection.
                if let (Ok(initiator), Ok(target)) = (stream, TcpStream::connect(there.to)) {
                    there.join(initiator, target);
                }
            }
        });
        Self { address, shared, acceptor: Some(acceptor) }
    }

    /// The address of a volume.
    #[must_use]
    pub fn url(&self, volume: &str) -> String {
        format!("twinrail://{}/{volume}", self.address)
    }

    /// From now on each new connection is broken after up to `longest` bytes, as this seed has it; and so are those
    /// that are there. `stalls` lets some of them stand with one direction dead.
    ///
    /// # Panics
    /// Never, unless another thread did.
    pub fn endanger(&self, seed: u64, longest: u64, stalls: bool) {
        *self.shared.danger.lock().unwrap() = Some(Danger { random: Random::new(seed), longest, stalls });
        self.kill(Kill::Reset);
    }

    /// New connections are safe from now on; those that are there are broken.
    ///
    /// # Panics
    /// Never, unless another thread did.
    pub fn make_peace(&self) {
        *self.shared.danger.lock().unwrap() = None;
        self.kill(Kill::Reset);
    }

    /// Breaks every connection that is there now; answers how many.
    pub fn kill(&self, kill: Kill) -> usize {
        let links: Vec<_> = self.links();
        let killed = links.iter().filter(|link| link.kill(kill)).count();
        self.shared.kills.fetch_add(killed as u64, Ordering::SeqCst);
        killed
    }

    /// Lets go on what was stalled.
    ///
    /// # Panics
    /// Never, unless another thread did.
    pub fn heal(&self) {
        for link in self.links() {
            link.state.lock().unwrap().stalled = [false; 2];
            link.changed.notify_all();
        }
    }

    fn links(&self) -> Vec<Arc<Link>> {
        let mut links = self.shared.links.lock().unwrap();
        links.retain(|link| link.strong_count() > 0);
        links.iter().filter_map(Weak::upgrade).collect()
    }

    /// Connections that were broken so far.
    #[must_use]
    pub fn kills(&self) -> u64 {
        self.shared.kills.load(Ordering::SeqCst)
    }

    /// Connections that were opened so far.
    #[must_use]
    pub fn opened(&self) -> u64 {
        self.shared.opened.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        let _wakes_the_acceptor = TcpStream::connect(self.address);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        self.kill(Kill::Reset);
    }
}

impl Shared {
    fn join(self: &Arc<Self>, initiator: TcpStream, target: TcpStream) {
        let _ = (initiator.set_nodelay(true), target.set_nodelay(true));
        let link = Link { initiator, target, state: Mutex::default(), changed: Condvar::new() };
        let link = Arc::new(link);
        self.opened.fetch_add(1, Ordering::SeqCst);
        let fate = {
            // The fate is drawn and the link is known at once: `endanger` and `make_peace` miss none.
            let mut danger = self.danger.lock().unwrap();
            self.links.lock().unwrap().push(Arc::downgrade(&link));
            danger.as_mut().map(|danger| Fate::draw(&mut danger.random, danger.longest, danger.stalls))
        };
        for way in [Way::ToTarget, Way::ToInitiator] {
            let (link, shared) = (link.clone(), self.clone());
            let fate = fate.filter(|fate| fate.way == way);
            thread::spawn(move || {
                let killed = link.pump(way, fate);
                shared.kills.fetch_add(u64::from(killed), Ordering::SeqCst);
            });
        }
    }
}

impl Link {
    /// Passes bytes on in one direction to the end; whether the end was its fate.
    fn pump(&self, way: Way, fate: Option<Fate>) -> bool {
        let (mut from, mut to) = match way {
            Way::ToTarget => (&self.initiator, &self.target),
            Way::ToInitiator => (&self.target, &self.initiator),
        };
        let mut room = vec![0; PIECE];
        let mut left = fate.map_or(u64::MAX, |fate| fate.after);
        let mut killed = false;
        loop {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(PIECE);
            let count = match from.read(&mut room[..most]) {
                Ok(count @ 1..) => count,
                // One side has hung up, or reset: so does the other.
                Ok(0) => {
                    self.kill(Kill::Close);
                    return killed;
                }
                _ => {
                    self.kill(Kill::Reset);
                    return killed;
                }
            };
            if !self.may_pass(way) || to.write_all(&room[..count]).is_err() {
                self.kill(Kill::Reset);
                return killed;
            }
            left -= count as u64;
            if left == 0
                && let Some(fate) = fate
            {
                killed |= self.kill(fate.kill);
                left = u64::MAX;
            }
        }
    }

    /// Waits while the direction is stalled; `false` when the connection is over.
    fn may_pass(&self, way: Way) -> bool {
        let state = self.state.lock().unwrap();
        let waits = |state: &mut State| !state.over && state.stalled[way as usize];
        !self.changed.wait_while(state, waits).unwrap().over
    }

    /// Breaks the connection, if it isn't yet; whether it wasn't.
    fn kill(&self, kill: Kill) -> bool {
        let mut state = self.state.lock().unwrap();
        if state.over {
            return false;
        }
        match kill {
            Kill::Deafen => state.stalled[Way::ToInitiator as usize] = true,
            Kill::Silence => state.stalled[Way::ToTarget as usize] = true,
            Kill::Reset | Kill::Close => state.over = true,
        }
        self.changed.notify_all();
        drop(state);
        for socket in [&self.initiator, &self.target] {
            // It may be gone already.
            match kill {
                Kill::Reset => drop(rustix::net::connect_unspec(socket)),
                Kill::Close => drop(socket.shutdown(Shutdown::Both)),
                Kill::Deafen | Kill::Silence => {}
            }
        }
        true
    }
}
