package mqtttest

import (
	"bufio"
	"sync"
	"testing"
)

// Fake is a scripted broker for exact faults. By itself it accepts every client, acknowledges every PUBLISH and delivers
// nothing to anybody. Change the script with its methods; they may be called at any time.
type Fake struct {
	server

	// guarded by server.mu
	connack   func(conn int) int
	publish   func(FakePublish) Answer
	suback    byte
	deaf      bool
	conns     int
	published []FakePublish
	acked     []uint16
	live      map[int]*fakeConn
}

// FakePublish is one PUBLISH that a Fake has seen.
type FakePublish struct {
	Conn    int // number of the connection, from 1
	Topic   string
	Payload string
	Dup     bool
	Retain  bool
	ID      uint16
}

// Answer is what a Fake does about a PUBLISH.
type Answer int

// Ack acknowledges it, Ignore does nothing, Close hangs up.
const (
	Ack Answer = iota
	Ignore
	Close
)

// NoConnack as the code of a CONNACK: say nothing.
const NoConnack = -1

type fakeConn struct {
	*peer
	write sync.Mutex
}

func (c *fakeConn) send(b ...byte) {
	c.write.Lock()
	defer c.write.Unlock()
	_, _ = c.Write(b)
}

// NewFake listens on 127.0.0.1.
func NewFake(t testing.TB) *Fake {
	f := &Fake{suback: 1, live: map[int]*fakeConn{}}
	f.start(t, f.talk)
	return f
}

// OnConnect decides the CONNACK code of each connection, numbered from 1; nil: 0, accepted.
func (f *Fake) OnConnect(code func(conn int) int) { f.set(func() { f.connack = code }) }

// OnPublish decides about each PUBLISH; nil: Ack. decide must not call the Fake.
func (f *Fake) OnPublish(decide func(FakePublish) Answer) { f.set(func() { f.publish = decide }) }

// Suback sets the code that a SUBACK has for every filter; 0x80 refuses.
func (f *Fake) Suback(code byte) { f.set(func() { f.suback = code }) }

// Deaf lets pings go unanswered.
func (f *Fake) Deaf(deaf bool) { f.set(func() { f.deaf = deaf }) }

// Send sends raw bytes to the connection with that number, if it is open.
func (f *Fake) Send(conn int, raw ...byte) {
	f.mu.Lock()
	c := f.live[conn]
	f.mu.Unlock()
	if c != nil {
		c.send(raw...)
	}
}

// Published is what was seen so far, in the order of arrival.
func (f *Fake) Published() []FakePublish {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]FakePublish(nil), f.published...)
}

// Acked is the packet ids of the PUBACKs that came from clients, in their order.
func (f *Fake) Acked() []uint16 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]uint16(nil), f.acked...)
}

// Await waits until ok about all that was published, and fails the test when that takes too long.
func (f *Fake) Await(what string, ok func([]FakePublish) bool) {
	f.t.Helper()
	f.await(what, func() bool { return ok(f.published) })
}

func (f *Fake) talk(p *peer) {
	c := &fakeConn{peer: p}
	var n int
	f.set(func() { f.conns++; n = f.conns; f.live[n] = c })
	defer f.set(func() { delete(f.live, n) })
	for r := bufio.NewReader(p); ; {
		packet, err := ReadPacket(r)
		if err != nil || !f.answer(c, n, packet) {
			return
		}
	}
}

// answer reports whether to go on.
func (f *Fake) answer(c *fakeConn, n int, packet Packet) bool {
	f.mu.Lock()
	connack, publish, suback, deaf := f.connack, f.publish, f.suback, f.deaf
	f.mu.Unlock()
	id := packet.ID()
	hi, lo := byte(id>>8), byte(id)
	switch packet.Type {
	case Connect:
		code := 0
		if connack != nil {
			code = connack(n)
		}
		if code == NoConnack {
			return true
		}
		c.send(Connack<<4, 2, 0, byte(code))
		return code == 0
	case Publish:
		seen := FakePublish{n, packet.Topic(), string(packet.Payload()), packet.Dup(), packet.Retain(), id}
		f.set(func() { f.published = append(f.published, seen) })
		answer := Ack
		if publish != nil {
			answer = publish(seen)
		}
		if answer == Ack && packet.QoS() > 0 {
			c.send(Puback<<4, 2, hi, lo)
		}
		return answer != Close
	case Subscribe:
		codes := []byte{}
		for rest := packet.body[2:]; len(rest) >= 3; {
			rest = rest[min(len(rest), 3+int(rest[0])<<8+int(rest[1])):]
			codes = append(codes, suback)
		}
		c.send(append([]byte{Suback << 4, byte(2 + len(codes)), hi, lo}, codes...)...)
	case Puback:
		f.set(func() { f.acked = append(f.acked, id) })
	case Unsubscribe:
		c.send(Unsuback<<4, 2, hi, lo)
	case Pingreq:
		if !deaf {
			c.send(Pingresp<<4, 0)
		}
	case Disconnect:
		return false
	}
	return true
}
