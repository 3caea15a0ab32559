import math, sys, time, functools, torch
sys.path.insert(0,'src'); sys.path.insert(0,'.')
from forgetting_transformer.ops.forgetting_attention import forgetting_attention, forgetting_attention_portable as P, forgetting_attention_reference as R
dev='cuda'
print(torch.__version__)
def rel(a,b): return ((a.double()-b.double()).norm()/b.double().norm().clamp(min=1e-30)).item()
def grads(fn,xs,do):
    xs=[x.detach().clone().requires_grad_() for x in xs]
    o=fn(*xs); o.backward(do.to(o.dtype)); return [o.detach()]+[x.grad for x in xs]
torch.manual_seed(0)
for M,N,D,sh,st in [(700,700,64,0,False),(2500,2500,64,4,False),(2500,2500,128,0,True),(300,2500,16,2,True),(1,999,64,2,True)]:
    B,H=2,3
    q,k,v=(torch.randn(B,H,L,D,device=dev).bfloat16() for L in (M,N,N)); lf=torch.nn.functional.logsigmoid(torch.randn(B,H,N,device=dev)+sh)
    do=torch.randn(B,H,M,D,device=dev).bfloat16(); s=1/math.sqrt(D); ss=torch.tensor([0,min(200,N-M+50)],device=dev) if st else None
    ref=grads(lambda *a:R(*a,ss,s),[q.double(),k.double(),v.double(),lf.double()],do)
    for name,xs,kw in [('fp32',[q.float(),k.float(),v.float(),lf],{}),('bf16 in',[q,k,v,lf],{}),('bf16 ch',[q,k,v,lf],dict(compute_dtype=torch.bfloat16))]:
        g=grads(lambda *a:P(*a,ss,s,**kw),xs,do); print(M,N,D,sh,st,name,['%.1e'%rel(a,b) for a,b in zip(g,ref)])
    with torch.no_grad(): o=forgetting_attention(q,k,v,lf,head_first=True,seq_start=ss); print('  no grad',o.dtype,'%.1e'%rel(o,ref[0]))
def bench(f,n=5):
    f(); torch.cuda.synchronize(); t=time.time(); [f() for _ in range(n)]; torch.cuda.synchronize(); return (time.time()-t)/n*1e3
B,H,T,D=1,24,16384,64
q,k,v=(torch.randn(B,H,T,D,device=dev).bfloat16().requires_grad_() for _ in range(3)); lf=torch.nn.functional.logsigmoid(torch.randn(B,H,T,device=dev)+3).requires_grad_()
for name,kw in [('default',{}),('bf16 channels',dict(compute_dtype=torch.bfloat16)),('bf16 one block',dict(compute_dtype=torch.bfloat16,block_size=T))]:
    torch.cuda.reset_peak_memory_stats(); base=torch.cuda.memory_allocated()
    print(name,'T=16k H=24 D=64 fwd+bwd ms %.1f'%bench(lambda:P(q,k,v,lf,None,0.125,**kw).sum().backward(),2),'peak MiB',(torch.cuda.max_memory_allocated()-base)/2**20)
with torch.no_grad(): print('no grad fwd ms %.1f'%bench(lambda:forgetting_attention(q,k,v,lf,head_first=True)))
try:
    import transformers; print('transformers',transformers.__version__)
    from forgetting_transformer.model import *
    from tests.model.small_models import *
    m=small_model(**PRO,use_rope=True).to(dev); ids=torch.randint(0,61,(2,40),device=dev)
    w=m.generate(ids,max_new_tokens=10,do_sample=False); w2=m.generate(ids,max_new_tokens=10,do_sample=False,use_cache=False); print('gen equal',torch.equal(w,w2))
    mask=torch.ones_like(ids); mask[0,:7]=0
    with torch.autocast('cuda',dtype=torch.bfloat16): print(m.generate(ids,attention_mask=mask,max_new_tokens=10,do_sample=False).shape)
    l=m(input_ids=ids,labels=ids).loss; c=small_model(**PRO,use_rope=True); lc=c(input_ids=ids.cpu(),labels=ids.cpu()).loss; print('loss cuda vs cpu %.1e'%rel(l.cpu(),lc))
    l.mean().backward(); lc.mean().backward(); print('grad %.1e'%max(rel(p.grad.cpu(),dict(c.named_parameters())[n].grad) for n,p in m.named_parameters()))
    cfg=ForgettingTransformerConfig(vocab_size=50257,hidden_size=768,num_hidden_layers=12,num_heads=12,**PRO)
    with torch.device('cuda'): m=ForgettingTransformerForCausalLM(cfg)
    ids=torch.randint(0,50257,(1,16384),device=dev); m.gradient_checkpointing_enable(); m.train()
    def step():
        with torch.autocast('cuda',dtype=torch.bfloat16): m(input_ids=ids,labels=ids).loss.mean().backward()
    torch.cuda.reset_peak_memory_stats(); print('125M 16k step ms %.0f'%bench(step,2),'peak GiB %.1f'%(torch.cuda.max_memory_allocated()/2**30))
except ImportError as e: print(e)
