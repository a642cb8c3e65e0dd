package mqtttest

import (
	"bufio"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy is a TCP proxy before a broker that understands MQTT packets (no TLS, no websocket).
type Proxy struct {
	server

	// guarded by server.mu
	counts  Counts
	target  string
	drop    int // PUBACKs still to be dropped; -1: all
	cutAt   int // counts.Publishes at which to cut; 0: never
	stalled bool
	delay   time.Duration
	rate    int
	decide  func(Packet) Verdict
	every   func(packet Packet, up bool) Verdict
}

// Counts is what a Proxy has seen since it was made.
type Counts struct {
	Connections    int // accepted
	Connects       int // CONNECT packets
	Publishes      int // PUBLISH packets from clients
	Pubacks        int // PUBACK packets from the broker, dropped ones included
	DroppedPubacks int
	Delivered      int // PUBLISH packets from the broker, Redelivered ones included
	Redelivered    int // those with the DUP flag
	ClientPubacks  int // PUBACK packets from clients
	Subscribes     int
	Unsubscribes   int
	Pings          int // PINGREQ packets from clients
	Pongs          int // PINGRESP packets from the broker: it has read what came before the ping
	Disconnects    int
	Open           int // connections open now
}

// Verdict is what to do with a packet.
type Verdict int

// Pass forwards it, Drop swallows it, CutBefore cuts the connection instead of forwarding it, CutAfter after that.
const (
	Pass Verdict = iota
	Drop
	CutBefore
	CutAfter
)

// NewProxy listens on 127.0.0.1 for clients of the broker at target (host:port).
func NewProxy(t testing.TB, target string) *Proxy {
	p := &Proxy{target: target}
	p.start(t, p.relay)
	return p
}

// DropPubacks drops the next n PUBACKs on their way to clients; all from now on if n < 0, none if 0.
func (p *Proxy) DropPubacks(n int) { p.set(func() { p.drop = max(n, -1) }) }

// CutAfterPublishes cuts all connections when n more PUBLISH packets of clients were forwarded; never if 0.
func (p *Proxy) CutAfterPublishes(n int) {
	p.set(func() {
		if p.cutAt = 0; n > 0 {
			p.cutAt = p.counts.Publishes + n
		}
	})
}

// Stall stops reading and forwarding, in both directions and on new connections too, which are still accepted.
func (p *Proxy) Stall(stall bool) { p.set(func() { p.stalled = stall }) }

// Delay forwards every packet that much later than it came, in both directions.
func (p *Proxy) Delay(d time.Duration) { p.set(func() { p.delay = d }) }

// Throttle limits what each connection forwards from its client to the broker, in bytes per second; 0: no limit.
func (p *Proxy) Throttle(rate int) { p.set(func() { p.rate = rate }) }

// OnPublish asks decide about every PUBLISH of a client, one at a time; nil: all pass. decide must not call the Proxy.
func (p *Proxy) OnPublish(decide func(Packet) Verdict) { p.set(func() { p.decide = decide }) }

// OnPacket asks decide about every packet, up to the broker and down to clients, one at a time; nil: all pass. What else is
// set goes first. decide must not call the Proxy.
func (p *Proxy) OnPacket(decide func(packet Packet, up bool) Verdict) {
	p.set(func() { p.every = decide })
}

// Target is the broker's host:port.
func (p *Proxy) Target() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.target
}

// SetTarget lets new connections lead to another broker.
func (p *Proxy) SetTarget(addr string) { p.set(func() { p.target = addr }) }

// Counts is what was seen so far.
func (p *Proxy) Counts() Counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.counts
}

// Await waits until ok, and fails the test when that takes too long.
func (p *Proxy) Await(what string, ok func(Counts) bool) {
	p.t.Helper()
	p.await(what, func() bool { return ok(p.counts) })
}

func (p *Proxy) relay(client *peer) {
	p.set(func() { p.counts.Connections++; p.counts.Open++ })
	defer p.set(func() { p.counts.Open-- })
	broker, err := net.Dial("tcp", p.Target())
	if err != nil {
		return
	}
	var directions sync.WaitGroup
	directions.Go(func() { p.forward(client, client, broker, true) })
	directions.Go(func() { p.forward(client, broker, client.Conn, false) })
	ended := make(chan struct{})
	p.tasks.Go(func() { // both ends go together
		select {
		case <-client.done:
		case <-ended:
		}
		client.end()
		broker.Close()
		p.set(func() {}) // wakes who waits out a stall
	})
	directions.Wait()
	close(ended)
}

type timed struct {
	due time.Time
	raw []byte
}

// forward reads packets from one side and hands them to a writer for the other, which waits out the delay. When the side
// has no more to say, the other is told so; any other end is the end of the whole connection.
func (p *Proxy) forward(client *peer, from io.Reader, to net.Conn, up bool) {
	line, written := make(chan timed, 4096), make(chan struct{})
	p.tasks.Go(func() {
		defer close(written)
		for item := range line {
			if wait := time.Until(item.due); wait > 0 {
				select {
				case <-client.done:
				case <-time.After(wait):
				}
			}
			if !p.ready(client) {
				continue
			}
			if _, err := to.Write(item.raw); err != nil {
				client.end()
			}
		}
	})
	r := bufio.NewReaderSize(&throttled{from, p, client, up}, 4<<10)
	var err error
	for err == nil {
		err = p.pass(client, r, line, up)
	}
	close(line)
	<-written
	if tcp, ok := to.(*net.TCPConn); ok && err == io.EOF {
		_ = tcp.CloseWrite()
		return
	}
	client.end()
}

func (p *Proxy) pass(client *peer, r *bufio.Reader, line chan<- timed, up bool) error {
	packet, err := ReadPacket(r)
	if err != nil {
		return err
	}
	if !p.ready(client) {
		return net.ErrClosed
	}
	verdict, delay := p.judge(packet, up)
	switch verdict {
	case Drop:
		return nil
	case CutBefore:
		return net.ErrClosed
	}
	select {
	case line <- timed{time.Now().Add(delay), packet.Raw}:
	case <-client.done:
		return net.ErrClosed
	}
	if verdict == CutAfter {
		return net.ErrClosed // forward cuts when this packet is written
	}
	return nil
}

// ready waits out a stall and reports whether the connection is still there.
func (p *Proxy) ready(client *peer) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		select {
		case <-client.done:
			return false
		default:
		}
		if !p.stalled {
			return true
		}
		p.change.Wait()
	}
}

// judge counts a packet and decides about it.
func (p *Proxy) judge(packet Packet, up bool) (verdict Verdict, delay time.Duration) {
	p.set(func() {
		delay = p.delay
		c := &p.counts
		switch {
		case up && packet.Type == Connect:
			c.Connects++
		case up && packet.Type == Publish:
			c.Publishes++
			if p.decide != nil {
				verdict = p.decide(packet)
			}
			if p.cutAt == c.Publishes && verdict == Pass {
				verdict, p.cutAt = CutAfter, 0
			}
		case up && packet.Type == Puback:
			c.ClientPubacks++
		case up && packet.Type == Subscribe:
			c.Subscribes++
		case up && packet.Type == Unsubscribe:
			c.Unsubscribes++
		case up && packet.Type == Pingreq:
			c.Pings++
		case up && packet.Type == Disconnect:
			c.Disconnects++
		case !up && packet.Type == Pingresp:
			c.Pongs++
		case !up && packet.Type == Publish:
			c.Delivered++
			if packet.Dup() {
				c.Redelivered++
			}
		case !up && packet.Type == Puback:
			c.Pubacks++
			if p.drop != 0 {
				verdict, p.drop = Drop, max(p.drop-1, -1)
				c.DroppedPubacks++
			}
		}
		if p.every != nil && verdict == Pass {
			verdict = p.every(packet, up)
		}
	})
	return verdict, delay
}

// throttled reads no faster than the rate, a twentieth of a second's worth at a time.
type throttled struct {
	io.Reader
	p      *Proxy
	client *peer
	up     bool
}

func (r *throttled) Read(b []byte) (int, error) {
	r.p.mu.Lock()
	rate := r.p.rate
	r.p.mu.Unlock()
	if rate == 0 || !r.up {
		return r.Reader.Read(b)
	}
	n, err := r.Reader.Read(b[:max(1, min(len(b), rate/20))])
	select {
	case <-time.After(time.Duration(n) * time.Second / time.Duration(rate)):
	case <-r.client.done:
	}
	return n, err
}
