//go:build faults

package main

import (
	"bytes"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"postrider/internal/mqtt"
	"postrider/internal/mqtttest"
	"postrider/internal/record"
)

// devNode is `dev` on addresses that it keeps over its deaths.
type devNode struct {
	t          *testing.T
	bin, db    string
	http, mqtt string
	proc       *spawned
	http1      *http.Client
	foldDB     string
}

func newDev(t *testing.T) *devNode {
	d := &devNode{t: t, bin: binary(t), db: filepath.Join(t.TempDir(), "n.db"), http: freeAddr(t), mqtt: freeAddr(t), http1: &http.Client{}}
	d.foldDB = strings.TrimSuffix(d.db, ".db") + ".fold.db"
	d.start()
	return d
}

func freeAddr(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func (d *devNode) start() {
	d.t.Helper()
	d.proc = spawn(d.t, d.bin, "dev", "--node", "n", "--db", d.db, "--listen", d.http, "--mqtt", d.mqtt, "--public", "counter")
	mqtttest.Eventually(d.t, "dev is there", func() bool {
		resp, err := d.http1.Get("http://" + d.http + "/readyz")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil && resp.StatusCode == http.StatusOK
	})
}

// post gives an input over HTTP; false: it must be given again.
func (d *devNode) post(run, id, data string) bool {
	req, err := http.NewRequest(http.MethodPost, "http://"+d.http+"/v1/tenants/default/agents/counter/runs/"+run+"/inputs", strings.NewReader(data))
	if err != nil {
		d.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", id)
	resp, err := d.http1.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		return false
	}
	if resp.StatusCode != http.StatusAccepted && resp.StatusCode != http.StatusServiceUnavailable {
		d.t.Errorf("%s: %s", resp.Status, &b)
	}
	return resp.StatusCode == http.StatusAccepted
}

// One id, twenty times at once, on three ways: one input.
func TestOneIDOnThreeWaysIsOneInput(t *testing.T) {
	d := newDev(t)
	c, err := mqtt.Dial(t.Context(), mqtt.Options{Broker: "tcp://" + d.mqtt, ClientID: "sender"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const data = `{"n": 9007199254740993}`
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			switch i % 3 {
			case 0:
				s := spawn(t, d.bin, "send", "counter", "run-1", "--id", "x", "--data", data, "--db", d.db)
				if <-s.done; s.err != nil {
					t.Errorf("send: %v", s.err)
				}
			case 1:
				if !d.post("run-1", "x", data) {
					t.Error("post was not taken")
				}
			default:
				del := c.Publish(record.Topics{}.AgentInbox("default", "counter"), false,
					[]byte(`{"specversion":"1.0","id":"1","source":"/s","type":"message","inputid":"x","torun":"run-1","data":`+data+`}`))
				if <-del.Done(); del.Error() != nil {
					t.Errorf("publish: %v", del.Error())
				}
			}
		})
	}
	wg.Wait()
	mqtttest.Eventually(t, "what came over MQTT is taken", func() bool {
		resp, err := d.http1.Get("http://" + d.http + "/metrics")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		var b bytes.Buffer
		_, err = b.ReadFrom(resp.Body)
		m := b.String()
		taken := 0
		for line := range strings.Lines(m) {
			if strings.HasPrefix(line, "postrider_inbound_messages_total{") {
				n, err := strconv.Atoi(strings.TrimSpace(line[strings.LastIndex(line, " "):]))
				if err != nil {
					t.Error(err)
				}
				taken += n
			}
		}
		return err == nil && taken == 6
	})
	if out := output(t, d.bin, "inbox", "ls", "--db", d.db, "--run", "run-1", "--state", "consumed", "--state", "dead", "--state", "pending", "--state", "running", "-o", "jsonl"); strings.Count(out, "\n") != 1 {
		t.Errorf("inputs: %s", out)
	}
	mqtttest.Eventually(t, "the step", func() bool {
		return strings.Contains(output(t, d.bin, "runs", "show", "run-1", "--db", d.db, "-o", "json"), `"step":1,`)
	})
}

// Two hundred inputs over HTTP, each given until it is answered, to a node that is killed again and again: the counter is
// 200 and so many events are at the fold.
func TestKilledNodeExportsEachInputOnce(t *testing.T) {
	d := newDev(t)
	for i := 1; i <= 200; i++ {
		if i%17 == 0 {
			killed := d.proc
			go killed.end(syscall.SIGKILL) // somewhere in what follows
			d.post("run-1", strconv.Itoa(i), "{}")
			<-killed.done
			d.start()
		}
		mqtttest.Eventually(t, "an input is taken", func() bool { return d.post("run-1", strconv.Itoa(i), "{}") })
	}
	mqtttest.Eventually(t, "all steps", func() bool {
		out := output(t, d.bin, "runs", "show", "run-1", "--db", d.db, "-o", "json")
		return strings.Contains(out, `"step":200,`) && strings.Contains(out, `"state":{"n":200}`)
	})
	mqtttest.Eventually(t, "all events", func() bool {
		s := spawn(t, d.bin, "fold", "show", "run-1", "--db", d.foldDB, "-o", "json")
		<-s.done
		return s.err == nil && strings.Contains(s.stdout.String(), `"lsn":201,`) && strings.Count(s.stdout.String(), `"counted"`) == 200
	})
	if out := output(t, d.bin, "inbox", "ls", "--db", d.db, "-o", "jsonl"); out != "" {
		t.Errorf("it waits: %s", out)
	}
	output(t, d.bin, "fold", "verify", "--db", d.foldDB)
	if out := output(t, d.bin, "outbox", "stats", "--db", d.db, "-o", "json"); !strings.Contains(out, fmt.Sprintf(`"shipped":%d,`, 201)) {
		t.Errorf("outbox: %s", out)
	}
}
