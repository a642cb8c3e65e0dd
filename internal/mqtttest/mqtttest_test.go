package mqtttest_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"postrider/internal/mqtttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// raw is a client that writes packets by hand.
type raw struct {
	t testing.TB
	net.Conn
	r *bufio.Reader
}

func connect(t testing.TB, addr string) *raw {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	r := &raw{t, c, bufio.NewReader(c)}
	r.send(0x10, 13, 0, 4, 'M', 'Q', 'T', 'T', 4, 2, 0, 60, 0, 1, 'c')
	return r
}

func (r *raw) send(b ...byte) {
	r.t.Helper()
	if _, err := r.Write(b); err != nil {
		r.t.Fatal(err)
	}
}

func (r *raw) publish(id byte, payload ...byte) {
	r.t.Helper()
	r.send(append([]byte{0x32, byte(5 + len(payload)), 0, 1, 't', 0, id}, payload...)...)
}

func (r *raw) expect(kind byte, id uint16) {
	r.t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(10 * time.Second))
	p, err := mqtttest.ReadPacket(r.r)
	if err != nil || p.Type != kind || p.ID() != id {
		r.t.Fatalf("got packet type %d, id %d (%v), want type %d, id %d", p.Type, p.ID(), err, kind, id)
	}
}

func (r *raw) expectEnd() {
	r.t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := mqtttest.ReadPacket(r.r); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		r.t.Fatalf("connection is not cut: %v", err)
	}
}

func (r *raw) expectNothing(d time.Duration) {
	r.t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(d))
	if _, err := r.r.Peek(1); !errors.Is(err, os.ErrDeadlineExceeded) {
		r.t.Fatalf("something came, or the end: %v", err)
	}
}

func TestProxyDropsPubacksAndForwardsTheRest(t *testing.T) {
	f := mqtttest.NewFake(t)
	p := mqtttest.NewProxy(t, f.Addr())
	c := connect(t, p.Addr())
	c.expect(mqtttest.Connack, 0)
	p.DropPubacks(2)
	for id := range byte(3) {
		c.publish(id + 1)
	}
	c.expect(mqtttest.Puback, 3)
	p.DropPubacks(-1)
	c.publish(4)
	c.send(0xc0, 0)
	c.expect(mqtttest.Pingresp, 0)
	p.DropPubacks(0)
	c.publish(5)
	c.expect(mqtttest.Puback, 5)
	if n := p.Counts(); n.Connects != 1 || n.Publishes != 5 || n.Pubacks != 5 || n.DroppedPubacks != 3 || n.Pings != 1 || n.Open != 1 {
		t.Fatalf("%+v", n)
	}
	if n := len(f.Published()); n != 5 {
		t.Fatalf("the broker saw %d", n)
	}
}

func TestProxyCutsAndRefuses(t *testing.T) {
	f := mqtttest.NewFake(t)
	p := mqtttest.NewProxy(t, f.Addr())
	c := connect(t, p.Addr())
	c.expect(mqtttest.Connack, 0)
	p.CutAfterPublishes(2)
	c.publish(1)
	c.expect(mqtttest.Puback, 1)
	c.publish(2)
	c.expectEndOr(mqtttest.Puback)
	f.Await("the last one got through", func(all []mqtttest.FakePublish) bool { return len(all) == 2 })

	c = connect(t, p.Addr())
	c.expect(mqtttest.Connack, 0)
	p.Refuse(true)
	if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("dial: %v", err)
	}
	c.publish(1)
	c.expect(mqtttest.Puback, 1) // an open connection stays
	p.Cut()
	c.expectEnd()
	p.Refuse(false)
	connect(t, p.Addr()).expect(mqtttest.Connack, 0)
}

// expectEndOr allows one packet of a kind before the end.
func (r *raw) expectEndOr(kind byte) {
	r.t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(10 * time.Second))
	if p, err := mqtttest.ReadPacket(r.r); err == nil && p.Type == kind {
		r.expectEnd()
	} else if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		r.t.Fatalf("connection is not cut: %v", err)
	}
}

func TestProxyStallsAndDelays(t *testing.T) {
	p := mqtttest.NewProxy(t, mqtttest.NewFake(t).Addr())
	c := connect(t, p.Addr())
	c.expect(mqtttest.Connack, 0)
	p.Stall(true)
	c.publish(1)
	c.expectNothing(50 * time.Millisecond)
	connect(t, p.Addr()).expectNothing(50 * time.Millisecond)
	p.Stall(false)
	c.expect(mqtttest.Puback, 1)

	p.Delay(60 * time.Millisecond)
	began := time.Now()
	for id := range byte(20) {
		c.publish(id)
	}
	for id := range uint16(20) {
		c.expect(mqtttest.Puback, id)
	}
	if took := time.Since(began); took < 120*time.Millisecond || took > 1200*time.Millisecond {
		t.Fatalf("20 messages with 60 ms of delay each way took %s", took)
	}

	p.Stall(true)
	p.Cut() // also while it stalls
	c.expectEnd()
}

func TestProxyTellsTheBrokerThatTheClientHasFinished(t *testing.T) {
	p := mqtttest.NewProxy(t, mqtttest.NewFake(t).Addr())
	c := connect(t, p.Addr())
	c.expect(mqtttest.Connack, 0)
	p.Delay(20 * time.Millisecond)
	c.publish(1)
	if err := c.Conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	c.expect(mqtttest.Puback, 1) // what was under way still arrives
	c.expectEnd()
	p.Await("no connection is open", func(n mqtttest.Counts) bool { return n.Open == 0 })
}

func TestProxyDecidesByPacket(t *testing.T) {
	f := mqtttest.NewFake(t)
	p := mqtttest.NewProxy(t, f.Addr())
	p.OnPublish(func(packet mqtttest.Packet) mqtttest.Verdict {
		switch string(packet.Payload()) {
		case "drop":
			return mqtttest.Drop
		case "cut":
			return mqtttest.CutBefore
		}
		return mqtttest.Pass
	})
	c := connect(t, p.Addr())
	c.expect(mqtttest.Connack, 0)
	c.publish(1, []byte("drop")...)
	c.publish(2, []byte("pass")...)
	c.expect(mqtttest.Puback, 2)
	c.publish(3, []byte("cut")...)
	c.expectEnd()
	if all := f.Published(); len(all) != 1 || all[0].Payload != "pass" || all[0].Topic != "t" || all[0].ID != 2 || all[0].Conn != 1 {
		t.Fatalf("the broker saw %+v", all)
	}
}

func TestFakeFollowsItsScript(t *testing.T) {
	f := mqtttest.NewFake(t)
	f.OnConnect(func(n int) int { return []int{5, mqtttest.NoConnack, 0}[n-1] })
	c := connect(t, f.Addr())
	c.expect(mqtttest.Connack, 0)
	c.expectEnd()
	connect(t, f.Addr()).expectNothing(50 * time.Millisecond)

	f.OnPublish(func(m mqtttest.FakePublish) mqtttest.Answer { return mqtttest.Answer(m.ID - 1) })
	c = connect(t, f.Addr())
	c.expect(mqtttest.Connack, 0)
	c.send(0x82, 8, 0, 9, 0, 3, 'a', '/', '#', 1)
	c.expect(mqtttest.Suback, 9)
	c.publish(1)
	c.expect(mqtttest.Puback, 1)
	c.publish(2)
	c.send(0xc0, 0)
	c.expect(mqtttest.Pingresp, 0)
	f.Send(3, 0x40, 2, 0, 2)
	c.expect(mqtttest.Puback, 2)
	c.publish(3)
	c.expectEnd()
}

func TestSilentSaysNothing(t *testing.T) {
	connect(t, mqtttest.Silent(t)).expectNothing(50 * time.Millisecond)
}

func TestReadPacketKeepsEveryByte(t *testing.T) {
	for _, size := range []int{0, 1, 120, 127, 128, 16_383, 16_384, 300_000} {
		n := size + 5
		in := []byte{0x3b} // dup, QoS 1, retain
		for ; n > 0x7f; n >>= 7 {
			in = append(in, byte(n)|0x80)
		}
		in = append(append(in, byte(n), 0, 1, 't', 1, 2), bytes.Repeat([]byte{7}, size)...)
		r := bufio.NewReader(io.MultiReader(bytes.NewReader(in), bytes.NewReader([]byte{0xc0, 0})))
		p, err := mqtttest.ReadPacket(r)
		if err != nil || !bytes.Equal(p.Raw, in) || p.Topic() != "t" || p.ID() != 0x102 || len(p.Payload()) != size || !p.Dup() || p.QoS() != 1 || !p.Retain() {
			t.Errorf("%d bytes: %v, %d payload bytes, id %d", size, err, len(p.Payload()), p.ID())
		}
		if p, err = mqtttest.ReadPacket(r); err != nil || p.Type != mqtttest.Pingreq {
			t.Errorf("next packet: %v %v", fmt.Sprint(p.Type), err)
		}
	}
	if _, err := mqtttest.ReadPacket(bufio.NewReader(bytes.NewReader(bytes.Repeat([]byte{0xff}, 9)))); err == nil {
		t.Error("a length of more than four bytes is read")
	}
}
